"""Tiny checkpoints, saved once for all tests of the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from support.tiny_checkpoints import CONFIGS, save_tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Directory of each tiny checkpoint, by the names of CONFIGS."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: save_tiny_checkpoint(name, root / name) for name in CONFIGS}
