"""The virtual environment of a checkout: is it complete, and if not, how it becomes so.

One JSON file in .venv (the stamp) says what was installed, from which pyproject.toml, where. While an
installation runs it says `installing`; whoever finds that later knows that the run was cut off. A package can
then be half unpacked and still look installed to pip, so the environment is emptied and made again (pip's
download cache makes that quick).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch_choice import TorchChoice

STAMP_NAME = "forkpoint-setup.json"
LOCK_NAME = "forkpoint-setup.lock"


class SetupError(Exception):
    """The environment cannot be made; the message says why and what to do."""


def gpu_is_present(root: Path = Path("/")) -> bool:
    """True if an NVIDIA GPU can be seen, without any tool or library of the vendor."""
    devices = (root / "dev").glob("nvidia[0-9]*")
    gpus = (root / "proc/driver/nvidia/gpus").glob("*")
    return any(devices) or any(gpus)


class Environment:
    """`<root>/.venv`. with_gpu chooses between a CUDA and a CPU build of torch."""

    def __init__(self, root: Path, *, with_gpu: bool) -> None:
        self.root = root
        self.venv = root / ".venv"
        self.bin = self.venv / "bin"
        self._with_gpu = with_gpu
        self._stamp = self.venv / STAMP_NAME
        self._lock_fds: tuple[int, ...] = ()

    def ensure(self, extras: set[str]) -> None:
        """Install Forkpoint with `extras`, unless that is done already. Raises SetupError.

        O(1) and without network when there is nothing to do. Extras that were installed before stay.
        """
        if self.is_complete(extras):
            return
        self.venv.mkdir(exist_ok=True)
        with self._lock():
            if not self.is_complete(extras):  # another ./dev may have done it while this one waited
                self._install(extras)

    def is_complete(self, extras: set[str]) -> bool:
        """True if the stamp says that these extras of this pyproject.toml are installed, here."""
        stamp = self._read_stamp()
        return (
            stamp.get("state") == "ready"
            and stamp.get("place") == self._place()
            and extras <= set(stamp.get("extras", ()))
            and (self.bin / "python").exists()
        )

    def _install(self, extras: set[str]) -> None:
        stamp = self._read_stamp()
        if (reason := self._reason_to_empty(stamp)) is not None:
            _say(f"{reason}; making {self.venv} again")
            self._empty()
        else:
            extras = extras | set(stamp.get("extras", ()))
        self._write_stamp("installing", extras)
        if not self._python_works():
            _say(f"making {self.venv} with Python {sys.version.split()[0]}")
            self._run([sys.executable, "-m", "venv", str(self.venv)], "cannot make the virtual environment")
        torch = TorchChoice.from_pyproject(self.root / "pyproject.toml", with_gpu=self._with_gpu)
        try:
            self._install_torch(torch)
            self._install_forkpoint(torch, extras)
        except SetupError:
            # pip ended by itself and took back what it had begun, so the next start may go on from here.
            self._write_stamp("failed", extras)
            raise
        self._write_stamp("ready", extras)
        _say(f"{self.venv} is ready")

    def _reason_to_empty(self, stamp: dict[str, Any]) -> str | None:
        """Why what lies in .venv cannot be built upon, or None."""
        if stamp.get("state") == "installing":
            return "the last installation was cut off"
        place = stamp.get("place", {})
        if place and place["root"] != str(self.root):
            return f"the environment was made for {place['root']}"
        if place and place["with_gpu"] != self._with_gpu:
            return "the choice between CPU and GPU changed"
        has_content = any(path.name != LOCK_NAME for path in self.venv.iterdir())
        if has_content and not self._python_works():
            return "its Python does not run"
        return None

    def _install_torch(self, torch: TorchChoice) -> None:
        if torch.is_installed_in(self.venv):
            return
        for attempt in torch.attempts():
            if not attempt.is_offered(str(self.bin / "python")):
                continue
            _say(attempt.notice)
            command = [*self._pip("install"), *attempt.options, attempt.requirement]
            self._run(command, f"cannot install {attempt.requirement}")
            return
        raise SetupError(
            f"no package index offers torch {torch.version} for Python {sys.version.split()[0]} here; "
            "use another Python (PATH decides), or point pip at an index that has it (PIP_EXTRA_INDEX_URL)"
        )

    def _install_forkpoint(self, torch: TorchChoice, extras: set[str]) -> None:
        _say(f"installing Forkpoint with {', '.join(sorted(extras))}")
        with tempfile.TemporaryDirectory() as folder:
            # A dependency that asks for any torch must not replace the build that was chosen.
            constraint = Path(folder) / "constraint.txt"
            constraint.write_text(f"torch=={torch.installed_version(self.venv)}\n", encoding="utf-8")
            target = f"{self.root}[{','.join(sorted(extras))}]"
            command = [*self._pip("install"), "--constraint", str(constraint), "--editable", target]
            self._run(command, "cannot install Forkpoint's dependencies")

    def _pip(self, command: str) -> list[str]:
        return [str(self.bin / "python"), "-m", "pip", command, "--disable-pip-version-check"]

    def _run(self, command: list[str], failure: str) -> None:
        # Output goes straight to the terminal: pip's progress bars are the progress that a person sees.
        # The child holds the lock too: if this process is killed, the next ./dev waits until pip has ended.
        status = subprocess.run(command, check=False, pass_fds=self._lock_fds).returncode
        if status < 0:
            raise KeyboardInterrupt
        if status != 0:
            raise SetupError(f"{failure} (pip's message is above); run the same ./dev command to try again")

    def _python_works(self) -> bool:
        python = self.bin / "python"
        if not python.exists():
            return False
        probe = [str(python), "-c", "import sys, pip; sys.exit(sys.version_info < (3, 10))"]
        return subprocess.run(probe, check=False, capture_output=True).returncode == 0

    def _empty(self) -> None:
        for path in self.venv.iterdir():
            if path.name == LOCK_NAME:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _place(self) -> dict[str, Any]:
        """What an installation depends on; the path, too: a virtual environment cannot be moved."""
        return {
            "root": str(self.root),
            "pyproject_sha256": _digest([self.root / "pyproject.toml"]),
            # The kernels are compiled by the installation. What it makes of them lies beside them.
            "native_sha256": _digest(_sources(self.root / "model" / "native")),
            "with_gpu": self._with_gpu,
        }

    def _read_stamp(self) -> dict[str, Any]:
        try:
            stamp = json.loads(self._stamp.read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        return stamp if isinstance(stamp, dict) else {}

    def _write_stamp(self, state: str, extras: set[str]) -> None:
        stamp = {"state": state, "extras": sorted(extras), "place": self._place()}
        temporary = self._stamp.with_suffix(".tmp")
        temporary.write_text(json.dumps(stamp, indent=2), encoding="utf-8")
        os.replace(temporary, self._stamp)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        with open(self.venv / LOCK_NAME, "w", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _say("another ./dev is installing; waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            self._lock_fds = (lock.fileno(),)
            yield


def _sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.suffix in (".cpp", ".h"))


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _say(text: str) -> None:
    print(f"dev: {text}", file=sys.stderr, flush=True)
