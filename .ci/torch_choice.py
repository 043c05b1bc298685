"""Which build of torch to install, and where to look for it.

pyproject.toml pins one version. For a CPU its `+cpu` build is a tenth of the size of the plain one, which on
Linux carries CUDA; an exact pin finds it wherever an index offers it.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Looking into PyTorch's own index must not hold up a machine that cannot reach it. The download itself may
# take as long as it needs: pip's --timeout is per read, not for the whole.
INDEX_LIMITS = ("--timeout", "5", "--retries", "0")
INDEX_WAIT_S = 20.0


@dataclass(frozen=True, slots=True)
class TorchAttempt:
    """One place that may have one build. options go to pip."""

    requirement: str
    build: str
    options: tuple[str, ...]
    notice: str
    wait_s: float | None = None

    def is_offered(self, python: str) -> bool:
        """True if pip, with these options and its own settings, sees this build for this Python."""
        command = [python, "-m", "pip", "index", "versions", "torch", "--disable-pip-version-check"]
        limits = INDEX_LIMITS if self.wait_s is not None else ()
        try:
            answer = subprocess.run(
                [*command, *self.options, *limits],
                check=False,
                capture_output=True,
                text=True,
                timeout=self.wait_s,
            )
        except subprocess.TimeoutExpired:
            return False
        return self.build in offered_versions(answer.stdout)


@dataclass(frozen=True, slots=True)
class TorchChoice:
    """The pinned version, and whether its CUDA build is wanted."""

    version: str
    with_gpu: bool

    @classmethod
    def from_pyproject(cls, pyproject: Path, *, with_gpu: bool) -> TorchChoice:
        """Read the pin. Raises ValueError if pyproject.toml does not pin torch exactly."""
        # Not tomllib: Python 3.10 does not have it.
        pin = re.search(r'"torch==([0-9][0-9.]*)"', pyproject.read_text(encoding="utf-8"))
        if pin is None:
            raise ValueError(f"{pyproject} has no exact pin of torch (torch==X.Y.Z)")
        return cls(pin.group(1), with_gpu)

    def attempts(self) -> tuple[TorchAttempt, ...]:
        """Where to look, best first."""
        cpu = f"{self.version}+cpu"
        if self.with_gpu:
            # A local version sorts above the plain one, so an index that has both would give the CPU build.
            requirement = f"torch=={self.version},!={cpu}"
            notice = f"installing torch {self.version} for the GPU (several GB)"
            return (TorchAttempt(requirement, self.version, (), notice),)
        pytorch_index = ("--index-url", PYTORCH_CPU_INDEX)
        return (
            TorchAttempt(f"torch=={cpu}", cpu, (), f"installing torch {cpu}"),
            TorchAttempt(
                f"torch=={cpu}",
                cpu,
                pytorch_index,
                f"installing torch {cpu} from {PYTORCH_CPU_INDEX}",
                INDEX_WAIT_S,
            ),
            TorchAttempt(
                f"torch=={self.version}",
                self.version,
                (),
                f"no CPU-only build of torch {self.version} was found; installing the plain one, "
                "which on Linux brings CUDA along (several GB)",
            ),
        )

    def installed_version(self, venv: Path) -> str:
        """The version in this environment, with its local part (2.13.0+cpu), or "" if there is none."""
        # The folder name says it without starting Python; a wheel's name has its local part after a plus.
        for metadata in venv.glob("lib/python3*/site-packages/torch-*.dist-info"):
            return metadata.name.removeprefix("torch-").removesuffix(".dist-info")
        return ""

    def is_installed_in(self, venv: Path) -> bool:
        """True if the pinned version is there, in a build for the wanted device."""
        installed = self.installed_version(venv)
        is_cpu_build = installed.endswith("+cpu")
        return installed.split("+")[0] == self.version and not (self.with_gpu and is_cpu_build)


def offered_versions(answer: str) -> frozenset[str]:
    """The versions that `pip index versions` lists."""
    listed = re.search(r"^Available versions:(.*)$", answer, re.MULTILINE)
    return frozenset(version.strip() for version in listed.group(1).split(",")) if listed else frozenset()
