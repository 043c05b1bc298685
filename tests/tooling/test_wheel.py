"""The wheel, installed in an environment of its own outside the repository, serves a model and the page."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import httpx2
import openai
import pytest
from support import served
from support.packaging import ROOT
from support.served import serve_ready
from support.tiny_models import one_character_per_token, save_tiny_model


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """A virtual environment with the wheel; all it depends on is borrowed from the running one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(python),
            "install",
            "--no-deps",
            "--no-index",
            str(wheel),
        ],
        check=True,
        capture_output=True,
    )
    (packages,) = folder.glob("lib/python3*/site-packages")
    # A folder that a .pth names is searched last; its own .pth files, an editable Forkpoint's, are not read.
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    return folder


@pytest.fixture
def outside(environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The environment, and commands start in a folder that has nothing to do with the repository."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(served, "FORKPOINT", str(environment / "bin" / "forkpoint"))
    return environment


def test_every_part_is_imported_from_the_wheel(outside: Path) -> None:
    code = (
        "from forkpoint import cache, configs, model, scheduler, server\n"
        "for part in (cache, configs, model, scheduler, server): print(part.__file__)"
    )
    done = subprocess.run(
        [outside / "bin" / "python", "-c", code], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 5
    assert all(Path(line).is_relative_to(outside) for line in lines), lines


def test_the_wheel_serves_completions_chats_and_the_page(outside: Path, wheel: Path, tmp_path: Path) -> None:
    has_kernels = any("/_kernels" in name for name in zipfile.ZipFile(wheel).namelist())
    model = save_tiny_model(tmp_path / "tiny", one_character_per_token())
    with serve_ready(model) as server:
        libraries = Path(f"/proc/{server.engine_process_id()}/maps").read_text("utf-8")
        assert (f"{outside}/" in libraries) == has_kernels, "the kernels of the wheel are loaded"
        assert f" {ROOT}/model/" not in libraries
        assert server.text("hello", max_tokens=5, ignore_eos=True)
        complete_and_chat(server.openai, server.model)
        read_page(server.http)


def complete_and_chat(client: openai.OpenAI, model: str) -> None:
    options = {"ignore_eos": True}
    completion = client.completions.create(model=model, prompt="hello", max_tokens=4, extra_body=options)
    assert completion.usage is not None and completion.usage.completion_tokens == 4
    chat = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "hello"}], max_tokens=4, extra_body=options
    )
    assert chat.usage is not None and chat.usage.completion_tokens == 4


def read_page(http: httpx2.Client) -> None:
    """Every file of the page that the repository has is answered as it is there."""
    files = sorted(path for path in (ROOT / "server" / "ui").iterdir() if path.is_file())
    assert files
    for path in files:
        address = "/" if path.name == "index.html" else f"/ui/{path.name}"
        answer = http.get(address)
        assert answer.status_code == 200, address
        assert answer.content == path.read_bytes()


def test_presets_come_with_the_wheel(outside: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("FORKPOINT_")}
    command = [str(outside / "bin" / "forkpoint"), "show-config", "--config", "low-memory"]
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr
    assert "low-memory" in done.stdout
