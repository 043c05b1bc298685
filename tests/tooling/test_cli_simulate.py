"""`forkpoint simulate`: its report, where its defaults come from, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from forkpoint.scheduler.traces import Workload
from forkpoint.server.cli import run

FIELDS = re.findall(
    r"\w+",
    """
prompt_tokens served_tokens served_pct ideal_pct computed_tokens rebuilt_tokens recomputed_tokens
row_layers row_layers_ideal row_layers_nocache peak_full_slots peak_swa_slots evicted_full_slots
evicted_swa_slots retractions leaked_slots requests
""",
)
SMALL = ["--system", "40", "--requests", "4", "--output-len", "5"]


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["simulate", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def heading(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The line above the table, which names what was simulated."""
    assert run(["simulate", *arguments]) == 0
    return capsys.readouterr().out.splitlines()[0]


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["simulate", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") <= 2
    return output.err


def test_the_report_has_the_published_fields(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "--workload", "shared", *SMALL)
    assert list(found) == FIELDS
    entry = ["id", "prompt_tokens", "full_hit", "resume", "cached", "rebuilt", "computed"]
    assert [list(one) for one in found["requests"]] == [entry] * 4
    assert found["requests"][1]["full_hit"] == 40


def test_the_report_is_plain_json_under_eviction_retraction_and_rebuilds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = report(
        capsys,
        *["--workload", "groups", "--system", "200", "--requests", "24", "--output-len", "150"],
        *["--window", "16", "--chunk", "64", "--concurrency", "6", "--page-size", "4", "--retention", "tail"],
        *["--full-slots", "1300", "--swa-slots", "400"],
    )
    assert min(found["evicted_full_slots"], found["evicted_swa_slots"], found["rebuilt_tokens"]) > 0
    assert min(found["retractions"], found["recomputed_tokens"]) > 0
    assert found["leaked_slots"] == 0
    assert all(type(found[name]) is int for name in FIELDS if name[-3:] != "pct" and name != "requests")


def test_the_table_shows_every_total(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--workload", "fewshot", *SMALL]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in FIELDS if name != "requests")


def test_defaults_are_those_of_the_published_driver(capsys: pytest.CaptureFixture[str]) -> None:
    shown = heading(capsys, "--workload", "shared")
    assert shown.startswith("layers SSSSSFSSSSSFSSSSSF, window 128, page 1, chunk 3072, concurrency 1, ")
    assert "full slots 152565, SWA slots 152565" in shown
    assert shown.endswith("retention anchors, eviction cost, rebuild on")
    found = report(capsys, "--workload", "chat", "--system", "100")
    assert len(found["requests"]) == 16 * 4


def test_a_trace_file_gives_what_its_workload_gives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = Workload("chat", 40, num_requests=3, num_turns=3, output_len=5).requests()
    path = tmp_path / "trace.jsonl"
    with path.open("w") as file:
        for request in requests:
            entry = {
                "id": request.id,
                "prompt": request.prompt.tolist(),
                "output": request.output.tolist(),
                "anchors": request.anchors,
            }
            print(json.dumps(entry), file=file)
    sizes = ["--window", "16", "--chunk", "64", "--concurrency", "2", "--page-size", "4"]
    built_in = [
        "--workload",
        "chat",
        "--system",
        "40",
        "--requests",
        "3",
        "--turns",
        "3",
        "--output-len",
        "5",
    ]
    assert report(capsys, "--trace", str(path), *sizes) == report(capsys, *built_in, *sizes)


def test_policies_can_be_named_in_two_ways(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--workload", "shared", *SMALL]
    assert "retention branch" in heading(capsys, *small, "--no-anchors")
    assert "retention tail" in heading(capsys, *small, "--no-branching")
    assert "retention tail" in heading(capsys, *small, "--no-branching", "--no-anchors")
    assert "retention tail" in heading(capsys, *small, "--no-anchors", "--retention", "tail")
    assert "eviction lru, rebuild off" in heading(capsys, *small, "--eviction", "lru", "--no-rebuild")


def test_pool_sizes_that_are_given_win_over_named_ones(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--workload", "shared", *SMALL, "--page-size", "16"]
    assert "full slots 1008, SWA slots 2000" in heading(
        capsys, *small, "--full-slots", "1020", "--swa-slots", "2000"
    )
    tight = heading(capsys, *small, "--pools", "tight", "--full-slots", "1020")
    assert f"full slots 1008, SWA slots {3072 + 128 + 128 + 32 + 64 + 6 * (128 + 16)}" in tight


def test_layers_of_one_kind_only(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--workload", "shared", *SMALL]
    assert "window none" in heading(capsys, *small, "--layers", "FF")
    assert report(capsys, *small, "--layers", "FF")["peak_swa_slots"] == 0
    assert report(capsys, *small, "--layers", "SSS", "--window", "8")["leaked_slots"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "neither --trace nor --workload is given"),
        (["--workload", "shared", "--trace", "x"], "--trace and --workload are given"),
        (["--workload", "sharde"], '"sharde" for --workload'),
        (["--workload", "shared", "--layers", "SSX"], "--layers holds 'X'"),
        (["--workload", "shared", "--layers", ""], "--layers is empty"),
        (["--workload", "shared", "--page-size", "0"], "--page-size is 0; it must be at least 1"),
        (["--workload", "shared", "--window", "-1"], "--window is -1; it must be at least 1"),
        (["--workload", "shared", "--requests", "0"], "--requests is 0; it must be at least 1"),
        (["--workload", "shared", "--full-slots", "0"], "--full-slots is 0; it must be at least 1"),
        (["--workload", "shared", "--chunk", "1.5"], "takes a whole number"),
        (["--workload", "shared", "--full-slots", "100"], "there are 100"),
        (["--workload", "shared", "--swa-slots", "100"], "the SWA pool has 100 slots"),
        (["--workload", "shared", "--retention", "all"], '"all" for --retention'),
        (["--workload", "shared", "--retention", "anchors", "--no-anchors"], "--no-anchors contradicts"),
        (["--workload", "shared", "--retention", "branch", "--no-branching"], "--no-branching contradicts"),
        (["--trace", "/does/not/exist"], "/does/not/exist cannot be read: No such file"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(capsys, *arguments)


def test_tight_pools_of_a_file_must_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"prompt": [1, 2]}\n')
    answer = refusal(capsys, "--trace", str(path), "--pools", "tight")
    assert "built-in workloads only" in answer
    assert "--full-slots" in answer


def test_a_broken_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"prompt": [1, 2]}\n{"prompt": [1, 2}\n')
    assert f"{path} line 2: " in refusal(capsys, "--trace", str(path))
