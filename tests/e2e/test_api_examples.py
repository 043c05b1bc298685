"""The examples of docs/api.md, run from top to bottom as a reader would."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.served import serve_ready

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
README_URL = "http://127.0.0.1:8000"


def examples(language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


def test_every_example_of_the_page_works(fragments_dir: Path) -> None:
    """Python blocks share their names; shell blocks must succeed."""
    assert examples("python") and examples("sh")
    with serve_ready(fragments_dir, "--served-model-name", "demo") as served:
        names: dict[str, Any] = {"__name__": "example"}
        for source in examples("python"):
            exec(compile(source.replace(README_URL, served.url), str(PAGE), "exec"), names)
        for command in examples("sh"):
            done = subprocess.run(
                ["sh", "-euc", command.replace(README_URL, served.url)], capture_output=True, text=True
            )
            assert done.returncode == 0, (command, done.stdout, done.stderr)


@pytest.mark.parametrize("language", ["python", "sh"])
def test_examples_name_the_server_of_the_readme(language: str) -> None:
    for source in examples(language):
        assert "http" not in source.replace(README_URL, "")
