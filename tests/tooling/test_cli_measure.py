"""`forkpoint measure-rebuild`: its table, its JSON, and what it refuses, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.tiny_models import one_character_per_token, save_tiny_model

from forkpoint.server.cli import run
from forkpoint.server.cli_measure_text import sample_text


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "letters", one_character_per_token())


def test_json_has_a_row_for_each_depth_that_was_asked_for(
    model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    depths = ("--depth", "1", "--depth", "3", "--depth", "exact")
    assert run(["measure-rebuild", str(model_dir), *depths, "--tokens", "200", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_tokens"], found["num_swa_layers"], found["dtype"]) == (192, 3, "float32")
    assert [row["depth"] for row in found["errors"]] == [1, 3, None]
    one, all_layers, exact = found["errors"]
    assert one["max_error"] > 1e-4 > all_layers["max_error"]
    assert exact["max_error"] == 0.0
    assert exact["equal_tokens"] == found["num_new"]


def test_the_table_names_the_default_depths(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["measure-rebuild", str(model_dir), "--tokens", "64"]) == 0
    first, header, *rows = capsys.readouterr().out.splitlines()
    assert first.startswith("full hit of 64 tokens without windows; 3 sliding-window layers")
    assert header.split()[0] == "--rebuild-depth"
    assert [row.split()[0] for row in rows] == ["1", "2", "4", "8", "exact"]
    assert all("of 32" in row for row in rows)


def test_a_text_of_the_users_own_is_measured(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "mine.txt"
    text.write_text("hello world " * 20, encoding="utf-8")
    arguments = ["measure-rebuild", str(model_dir), "--text", str(text), "--depth", "1", "--json"]
    assert run([*arguments, "--tokens", "160"]) == 0
    assert json.loads(capsys.readouterr().out)["num_tokens"] == 160
    assert run([*arguments, "--tokens", "1000"]) == 2
    refusal = capsys.readouterr().err
    assert (
        "tokens; a hit of 1000 needs 1016" in refusal and "hint: give a longer text, or --tokens" in refusal
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--depth", "0"), "--depth is 0; it must be 1 or more, or exact"),
        (("--tokens", "3"), "--tokens is 3; it must be 16 or more"),
        (("--tokens", "100000"), "beyond the model's context"),
        (("--text", "/nowhere/text"), "--text /nowhere/text cannot be read"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    model_dir: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], complaint: str
) -> None:
    assert run(["measure-rebuild", str(model_dir), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert complaint in captured.err


def test_the_sample_text_is_always_the_same_and_never_repeats_a_paragraph() -> None:
    text = sample_text(60_000)
    assert text == sample_text(60_000) and text.startswith(sample_text(1_000))
    paragraphs = text.splitlines()
    assert len(paragraphs) > 100
    assert len({paragraph.partition(". ")[2] for paragraph in paragraphs}) == len(paragraphs)
