"""Pools that no machine has memory for: refused at the start, in one line that names the flag."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.served import PATIENCE_S, launch


@pytest.mark.parametrize("flag", ["--kv-cache-memory-bytes", "--max-total-tokens"])
def test_too_large_a_pool_is_one_line_that_names_the_flag(letters_dir: Path, flag: str) -> None:
    with launch(letters_dir, "--port", "0", "--log-format", "json", flag, "900000000000000") as process:
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    *logged, first, hint = errors.splitlines()
    assert first.startswith("forkpoint: error: ") and "of memory are available" in first
    assert hint == f"hint: lower {flag}"
    assert "Traceback" not in errors and not any("killed" in line for line in logged)
