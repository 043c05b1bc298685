"""One wheel for all tests that look into it: compiling its kernels takes a minute."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.packaging import build, copy_of_sources


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the sources as they are."""
    source = copy_of_sources(tmp_path_factory.mktemp("source"))
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))
