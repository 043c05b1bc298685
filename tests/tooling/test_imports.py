"""What importing a part brings along, and that no part exists twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PARTS = {"server", "model", "cache", "scheduler", "configs"}


def modules_after(statement: str, folder: Path) -> set[str]:
    """Names in sys.modules of a new Python that ran `statement`."""
    # On standard error: a command that runs here prints to the other one.
    code = f"import sys\n{statement}\nprint('\\n'.join(sys.modules), file=sys.stderr)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return set(done.stderr.split())


@pytest.mark.parametrize(
    "module",
    [
        "forkpoint.cache",
        "forkpoint.scheduler.client",
        "forkpoint.scheduler.grammar",
        "forkpoint.scheduler.messages",
        "forkpoint.server.cli",
    ],
)
def test_importing_it_brings_no_torch(module: str, tmp_path: Path) -> None:
    assert "torch" not in modules_after(f"import {module}", tmp_path)


def test_the_probe_sees_torch_where_it_is_imported(tmp_path: Path) -> None:
    assert "torch" in modules_after("import torch", tmp_path)


def test_the_command_line_starts_without_the_heavy_libraries(tmp_path: Path) -> None:
    modules = modules_after("from forkpoint.server.cli import run\nrun(['serve', '--help'])", tmp_path)
    assert not {"torch", "transformers", "fastapi", "tokenizers"} & modules


def test_a_simulation_runs_without_the_heavy_libraries(tmp_path: Path) -> None:
    command = ["simulate", "--workload", "shared", "--system", "40", "--requests", "2"]
    modules = modules_after(f"from forkpoint.server.cli import run\nrun({command})", tmp_path)
    assert "forkpoint.scheduler.scheduler" in modules
    assert not {"torch", "transformers", "fastapi", "tokenizers"} & modules


def test_the_api_process_serves_without_torch(tmp_path: Path) -> None:
    statement = (
        "import forkpoint.server.run, forkpoint.server.text, forkpoint.server.chat_template\n"
        "import forkpoint.scheduler.process_client, forkpoint.model.resolve"
    )
    assert "torch" not in modules_after(statement, tmp_path)


def test_the_engine_is_spawned_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3_text"}), encoding="utf-8")
    statement = f"""
from forkpoint.scheduler.process_client import ProcessEngine
from forkpoint.server.cli import run
def spawn(self):
    print("spawned", *sys.modules, file=sys.stderr)
    sys.exit()
ProcessEngine.spawn = spawn
run(["serve", {str(tmp_path)!r}, "--port", "0"])"""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{statement}"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    word, *modules = done.stderr.split()
    assert word == "spawned" and "forkpoint.model.resolve" in modules
    assert not {"torch", "transformers", "fastapi", "uvicorn", "tokenizers", "jinja2"} & set(modules)


def test_no_part_is_imported_under_its_bare_name() -> None:
    assert not PARTS & sys.modules.keys()
