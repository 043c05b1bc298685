"""The packages in pyproject.toml are the folders that exist, and a wheel holds all that they need."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from setuptools.config.pyprojecttoml import read_configuration

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("server", "model", "cache", "scheduler", "configs")
TOP_LEVEL = {*PARTS, "tests", "benchmarks", "docs", "deploy", ".ci"}


def tracked_files() -> list[Path]:
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    return [Path(line) for line in listing.stdout.splitlines()]


# ext-modules is marked as experimental; a setup.py for four lines of data would be the alternative.
@pytest.mark.filterwarnings("ignore:`\\[tool.setuptools.ext-modules")
def test_the_packages_list_equals_the_folders_with_an_init() -> None:
    configuration = read_configuration(str(ROOT / "pyproject.toml"), expand=False)
    listed = configuration["tool"]["setuptools"]["packages"]
    folders = [init.parent.relative_to(ROOT) for part in PARTS for init in (ROOT / part).rglob("__init__.py")]
    assert sorted(listed) == sorted("forkpoint." + ".".join(folder.parts) for folder in folders)


def test_the_repository_root_is_no_package() -> None:
    assert not (ROOT / "__init__.py").exists()
    assert not (ROOT / "conftest.py").exists()


def test_top_level_folders_are_the_agreed_ones() -> None:
    folders = {path.parts[0] for path in tracked_files() if len(path.parts) > 1}
    assert folders <= TOP_LEVEL


def test_every_module_opens_with_what_it_is_for() -> None:
    modules = [path for path in tracked_files() if path.suffix == ".py" and path.name != "__init__.py"]
    silent = [path for path in modules if not re.match(r'(#!.*\n)?r?"""\S', (ROOT / path).read_text("utf-8"))]
    assert modules
    assert silent == []


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Files in a wheel that is built from a copy, so that no build folder stays in the checkout."""
    source = tmp_path_factory.mktemp("source")
    for path in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / path, source)
    for part in PARTS:
        shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
    build = "import sys, setuptools.build_meta as backend; backend.build_wheel(sys.argv[1])"
    target = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-c", build, str(target)], cwd=source, check=True, capture_output=True)
    (wheel,) = target.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_holds_every_module_and_data_file(wheel_names: set[str]) -> None:
    kept = {".py", ".yaml", ".jinja", ".json", ".typed"}
    files = [path for part in PARTS for path in (ROOT / part).rglob("*") if path.is_file()]
    wanted = {f"forkpoint/{path.relative_to(ROOT)}" for path in files if path.suffix in kept}
    assert any(name.endswith(".jinja") for name in wanted)
    assert wanted <= wheel_names


def test_every_part_of_the_wheel_is_typed(wheel_names: set[str]) -> None:
    assert {f"forkpoint/{part}/py.typed" for part in PARTS} <= wheel_names


def test_the_wheel_adds_nothing_outside_its_namespace(wheel_names: set[str]) -> None:
    assert {name.split("/")[0] for name in wheel_names if ".dist-info/" not in name} == {"forkpoint"}
