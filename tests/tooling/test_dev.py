"""./dev: what it says to wrong arguments, and how it tells a complete environment from a broken one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / ".ci"))

from environment import STAMP_NAME, Environment, SetupError, gpu_is_present  # noqa: E402
from torch_choice import PYTORCH_CPU_INDEX, TorchChoice, offered_versions  # noqa: E402

PYPROJECT = 'dependencies = [\n    "torch==2.13.0",\n]\n'


def dev(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    command = [str(ROOT / "dev"), *arguments]
    return subprocess.run(command, cwd="/", env=environment, check=False, capture_output=True, text=True)


def ready_environment(root: Path, extras: set[str], *, with_gpu: bool = False) -> Environment:
    """An environment that looks installed: a Python, and a stamp that says so."""
    (root / "pyproject.toml").write_text(PYPROJECT)
    environment = Environment(root, with_gpu=with_gpu)
    environment.bin.mkdir(parents=True)
    (environment.bin / "python").symlink_to(sys.executable)
    environment._write_stamp("ready", extras)
    return environment


def test_help_lists_every_command() -> None:
    done = dev("help")
    assert done.returncode == 0
    for command in ("serve", "test", "check", "fuzz"):
        assert f"\n  {command}" in done.stdout


def test_no_command_shows_the_help() -> None:
    assert dev().stdout == dev("help").stdout


def test_an_unknown_command_is_refused() -> None:
    done = dev("sevre")
    assert done.returncode == 2
    assert "'sevre'" in done.stderr


def test_an_unknown_device_is_refused_before_anything_is_installed() -> None:
    done = dev("serve", FORKPOINT_DEV_DEVICE="tpu")
    assert done.returncode == 1
    assert "FORKPOINT_DEV_DEVICE is 'tpu'" in done.stderr


def test_an_environment_is_complete_for_the_extras_it_has(tmp_path: Path) -> None:
    environment = ready_environment(tmp_path, {"demo", "test"})
    assert environment.is_complete({"demo"})
    assert environment.is_complete({"demo", "test"})
    assert not environment.is_complete({"demo", "gpu"})


def test_a_changed_pyproject_makes_it_incomplete(tmp_path: Path) -> None:
    environment = ready_environment(tmp_path, {"demo"})
    (tmp_path / "pyproject.toml").write_text(PYPROJECT + "# changed\n")
    assert not environment.is_complete({"demo"})


@pytest.mark.parametrize("changed", ["kernel.cpp", "kernel.h"])
def test_a_changed_kernel_makes_it_incomplete_and_what_is_compiled_of_it_does_not(
    tmp_path: Path, changed: str
) -> None:
    native = tmp_path / "model" / "native"
    native.mkdir(parents=True)
    (native / "kernel.cpp").write_text("one")
    (native / "kernel.h").write_text("one")
    environment = ready_environment(tmp_path, {"demo"})
    for compiled in ("_kernels.cpython-311-x86_64-linux-gnu.so", "kernel.cpp.o", "library.py"):
        (native / compiled).write_text("made later")
    assert environment.is_complete({"demo"})
    (native / changed).write_text("two")
    assert not environment.is_complete({"demo"})


def test_a_gpu_that_appeared_makes_it_incomplete(tmp_path: Path) -> None:
    ready_environment(tmp_path, {"demo"})
    assert not Environment(tmp_path, with_gpu=True).is_complete({"demo"})


def test_a_moved_checkout_makes_it_incomplete(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    ready_environment(tmp_path / "old", {"demo"})
    moved = (tmp_path / "old").rename(tmp_path / "new")
    assert not Environment(moved, with_gpu=False).is_complete({"demo"})


def test_a_python_that_is_gone_makes_it_incomplete(tmp_path: Path) -> None:
    environment = ready_environment(tmp_path, {"demo"})
    (environment.bin / "python").unlink()
    assert not environment.is_complete({"demo"})


def test_a_stamp_that_was_cut_off_counts_as_none(tmp_path: Path) -> None:
    environment = ready_environment(tmp_path, {"demo"})
    (environment.venv / STAMP_NAME).write_text('{"state": "rea')
    assert not environment.is_complete({"demo"})


def test_a_cut_off_installation_is_thrown_away_and_a_failed_one_is_not_called_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without any index there is no torch: the second installation ends by itself, and says so.
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    environment = ready_environment(tmp_path, {"demo"})
    environment._write_stamp("installing", {"demo"})
    (environment.venv / "half-unpacked").touch()

    with pytest.raises(SetupError, match=r"no package index offers torch 2\.13\.0"):
        environment.ensure({"demo"})

    assert not (environment.venv / "half-unpacked").exists()
    assert json.loads((environment.venv / STAMP_NAME).read_text())["state"] == "failed"
    assert not environment.is_complete({"demo"})


def test_a_gpu_is_seen_by_its_device_file_or_by_the_driver(tmp_path: Path) -> None:
    assert not gpu_is_present(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia-caps").touch()
    assert not gpu_is_present(tmp_path)
    (tmp_path / "dev" / "nvidia0").touch()
    assert gpu_is_present(tmp_path)
    (tmp_path / "driver" / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    assert gpu_is_present(tmp_path / "driver")


def test_the_pin_of_torch_is_read_from_the_projects_file() -> None:
    choice = TorchChoice.from_pyproject(ROOT / "pyproject.toml", with_gpu=False)
    assert choice.version.count(".") == 2


def test_a_cpu_build_is_looked_for_in_the_users_index_then_in_pytorchs_then_the_plain_one() -> None:
    attempts = TorchChoice("2.13.0", with_gpu=False).attempts()
    assert [attempt.requirement for attempt in attempts] == [
        "torch==2.13.0+cpu",
        "torch==2.13.0+cpu",
        "torch==2.13.0",
    ]
    assert [PYTORCH_CPU_INDEX in attempt.options for attempt in attempts] == [False, True, False]
    assert [attempt.wait_s is not None for attempt in attempts] == [False, True, False]
    assert "several GB" in attempts[-1].notice


def test_a_gpu_machine_never_gets_the_cpu_build() -> None:
    (attempt,) = TorchChoice("2.13.0", with_gpu=True).attempts()
    assert attempt.requirement == "torch==2.13.0,!=2.13.0+cpu"


def test_the_installed_build_is_known_by_its_folder(tmp_path: Path) -> None:
    (tmp_path / "lib/python3.11/site-packages/torch-2.13.0+cpu.dist-info").mkdir(parents=True)
    assert TorchChoice("2.13.0", with_gpu=False).is_installed_in(tmp_path)
    assert not TorchChoice("2.13.0", with_gpu=True).is_installed_in(tmp_path)
    assert not TorchChoice("2.14.0", with_gpu=False).is_installed_in(tmp_path)


def test_offered_versions_are_read_whole() -> None:
    answer = "torch (2.15.0)\nAvailable versions: 2.15.0, 2.13.0+cpu, 2.13.0\n  INSTALLED: 2.12.0\n"
    assert offered_versions(answer) == {"2.15.0", "2.13.0+cpu", "2.13.0"}
    assert offered_versions("ERROR: No matching distribution found for torch") == frozenset()
