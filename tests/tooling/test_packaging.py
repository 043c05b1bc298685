"""The packages in pyproject.toml are the folders that exist, and a wheel holds all that they need."""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
from setuptools.config.pyprojecttoml import read_configuration
from support.packaging import PARTS, ROOT, build, copy_of_sources

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
def wheel_names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def is_library(name: str) -> bool:
    return name.startswith("forkpoint/model/native/_kernels") and name.endswith(".so")


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler here")
def test_the_wheel_holds_the_kernels_and_not_their_sources(wheel_names: set[str]) -> None:
    assert [name for name in wheel_names if name.endswith(".so")] == list(filter(is_library, wheel_names))
    assert any(map(is_library, wheel_names))
    assert not any(name.endswith((".cpp", ".h")) for name in wheel_names)


def test_a_compiler_that_fails_leaves_the_kernels_out_and_the_rest_in(
    tmp_path: Path, wheel_names: set[str]
) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "wheel").mkdir()
    broken = tmp_path / "compiler"
    broken.write_text("#!/bin/sh\necho called >> $0.log\nexit 1\n")
    broken.chmod(0o755)
    source = copy_of_sources(tmp_path / "source")
    wheel = build("wheel", source, tmp_path / "wheel", CC=str(broken), CXX=str(broken))
    names = set(zipfile.ZipFile(wheel).namelist())
    assert (tmp_path / "compiler.log").exists()
    assert not any(map(is_library, names))
    kept = {name for name in wheel_names if not is_library(name) and ".dist-info/" not in name}
    assert kept == {name for name in names if ".dist-info/" not in name}


def test_the_sdist_holds_all_that_the_kernels_are_made_of(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "sdist").mkdir()
    wanted = {str(path) for path in tracked_files() if path.suffix in (".cpp", ".h")}
    assert wanted
    with tarfile.open(build("sdist", copy_of_sources(tmp_path / "source"), tmp_path / "sdist")) as sdist:
        assert wanted <= {name.partition("/")[2] for name in sdist.getnames()}


def test_the_wheel_holds_every_module_and_data_file(wheel_names: set[str]) -> None:
    kept = {".py", ".yaml", ".jinja", ".json", ".typed", ".html", ".css", ".js"}
    files = [path for part in PARTS for path in (ROOT / part).rglob("*") if path.is_file()]
    wanted = {f"forkpoint/{path.relative_to(ROOT)}" for path in files if path.suffix in kept}
    assert {".jinja", ".yaml", ".html", ".js"} <= {Path(name).suffix for name in wanted}
    assert wanted <= wheel_names


def test_every_part_of_the_wheel_is_typed(wheel_names: set[str]) -> None:
    assert {f"forkpoint/{part}/py.typed" for part in PARTS} <= wheel_names


def test_the_wheel_adds_nothing_outside_its_namespace(wheel_names: set[str]) -> None:
    assert {name.split("/")[0] for name in wheel_names if ".dist-info/" not in name} == {"forkpoint"}
