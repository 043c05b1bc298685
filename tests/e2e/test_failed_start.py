"""Starts that cannot succeed: one line and a hint, and no process stays behind."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.served import FORKPOINT, PATIENCE_S


def refused(model: Path | str, *flags: str) -> list[str]:
    """The last lines that a start prints which ends with status 2: the error, and its hint.

    Its end is awaited by the pipe too: a process that stayed behind would hold that open.
    """
    command = [FORKPOINT, "serve", str(model), "--port", "0", "--device", "cpu", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    lines = done.stderr.splitlines()
    errors = [index for index, line in enumerate(lines) if line.startswith("forkpoint: error: ")]
    assert len(errors) == 1
    return lines[errors[0] :]


def break_tokenizer(model_dir: Path) -> None:
    (model_dir / "tokenizer.json").write_text("{}", encoding="utf-8")


def remove_tokenizer(model_dir: Path) -> None:
    (model_dir / "tokenizer.json").unlink()


def remove_weights(model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("harm", "error"),
    [
        (break_tokenizer, "tokenizer.json cannot be read"),
        (remove_tokenizer, "has no tokenizer.json"),
        (remove_weights, "has neither model.safetensors nor model.safetensors.index.json"),
    ],
)
def test_incomplete_directory(
    letters_dir: Path, tmp_path: Path, harm: Callable[[Path], None], error: str
) -> None:
    model_dir = shutil.copytree(letters_dir, tmp_path / "model")
    harm(model_dir)
    assert error in refused(model_dir)[0]


@pytest.mark.parametrize(
    ("flags", "error", "hint"),
    [
        (("--max-total-tokens", "8"), "", "--max-total-tokens"),
        (("--kv-cache-memory-bytes", "1000"), "", "--kv-cache-memory-bytes"),
        (("--context-length", "99999999"), "beyond the model's", "lower --context-length to"),
    ],
)
def test_sizes_that_cannot_be(letters_dir: Path, flags: tuple[str, ...], error: str, hint: str) -> None:
    first, second = refused(letters_dir, *flags)
    assert error in first
    assert second.startswith("hint: ") and hint in second
    assert not second.removeprefix("hint: ").startswith("--"), "a hint is a sentence"
