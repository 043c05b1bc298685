"""docs/operating.md and docs/troubleshooting.md name only messages, flags, metrics and paths that exist."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.http_server import serving

from forkpoint.server.cli_layers import OTHER_VARIABLES

ROOT = Path(__file__).resolve().parents[2]
OPERATING = ROOT / "docs" / "operating.md"
TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
PAGES = (OPERATING, TROUBLESHOOTING)
FORKPOINT = str(Path(sys.executable).with_name("forkpoint"))


def source_texts() -> set[str]:
    """Every text in the code, with `...` for what an f-string puts in."""
    texts = set()
    for part in ("server", "scheduler", "cache", "model", "configs"):
        for path in (ROOT / part).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    pieces = [
                        piece.value if isinstance(piece, ast.Constant) else "..." for piece in node.values
                    ]
                    texts.add(re.sub(r"(\.\.\.)+", "...", "".join(map(str, pieces))))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.add(node.value)
    return texts


def quoted_messages() -> list[str]:
    """The column `message` of every table of the troubleshooting page."""
    messages = []
    column = None
    for line in TROUBLESHOOTING.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("|") else []
        if "message" in cells:
            column = cells.index("message")
        elif not cells:
            column = None
        elif column is not None and not line.startswith("|--"):
            messages.append(cells[column].strip("`"))
    return messages


def test_every_message_of_the_troubleshooting_page_is_in_the_code() -> None:
    messages, texts = quoted_messages(), source_texts()
    assert len(messages) > 40
    assert len(set(messages)) == len(messages)
    assert [message for message in messages if not any(message in text for text in texts)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_of_the_server_that_a_page_names_exists(page: Path) -> None:
    done = subprocess.run([FORKPOINT, "serve", "--help"], capture_output=True, text=True, check=True)
    known = set(re.findall(r"--[a-z][a-z-]+[a-z]", done.stdout))
    others = {"--build", "--stop-timeout", "--set", "--now", "--gpus", "--help"}  # docker, helm, systemctl
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+[a-z]", page.read_text("utf-8")))
    assert used & known
    assert used - others - known == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_setting_of_the_environment_that_a_page_names_exists(page: Path) -> None:
    done = subprocess.run([FORKPOINT, "serve", "--help"], capture_output=True, text=True, check=True)
    flags = re.findall(r"--([a-z][a-z-]+[a-z])", done.stdout)
    known = {f"FORKPOINT_{flag.upper().replace('-', '_')}" for flag in flags} | OTHER_VARIABLES
    used = set(re.findall(r"\bFORKPOINT_[A-Z_]+[A-Z]", page.read_text("utf-8")))
    assert used
    assert used - known == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_metric_that_a_page_names_exists(page: Path) -> None:
    names = set(re.findall(r"`(forkpoint_[a-z_]+[a-z])", page.read_text("utf-8")))
    assert names
    with serving() as world:
        exported = set(re.findall(r"^(forkpoint_\w+)", world.http.get("/metrics").text, re.M))
        # Series with labels are there once something was counted.
        exported |= set(re.findall(r"^# TYPE (forkpoint_\w+)", world.http.get("/metrics").text, re.M))
    assert {name for name in names if name not in exported and f"{name}_total" not in exported} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_and_folder_that_a_page_names_exists(page: Path) -> None:
    named = set(re.findall(r"\b((?:docs|deploy)/[\w./-]*\w)", page.read_text("utf-8")))
    assert named
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_the_pages_are_found_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    for page in PAGES:
        assert page.name in readme
