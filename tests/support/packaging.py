"""Builds wheels and sdists of a copy of the sources, so that nothing is built in the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("server", "model", "cache", "scheduler", "configs")


def copy_of_sources(target: Path) -> Path:
    """What a build needs, without what was compiled of it."""
    for path in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / path, target)
    for part in PARTS:
        shutil.copytree(ROOT / part, target / part, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return target


def build(kind: Literal["wheel", "sdist"], source: Path, target: Path, **variables: str) -> Path:
    """The wheel or the sdist of `source`, built into the empty folder `target`."""
    code = f"import sys, setuptools.build_meta as backend; backend.build_{kind}(sys.argv[1])"
    environment = {**os.environ, **variables}
    command = [sys.executable, "-c", code, str(target)]
    subprocess.run(command, cwd=source, env=environment, check=True, capture_output=True)
    (built,) = target.iterdir()
    return built
