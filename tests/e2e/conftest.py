"""The tiny models, and one server with roomy pools for every test that does no harm to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.served import ServedModel, serve_ready
from support.tiny_models import bytes_and_pieces, one_character_per_token, save_tiny_model


@pytest.fixture(scope="session")
def letters_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose text tells its tokens."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "letters", one_character_per_token())


@pytest.fixture(scope="session")
def fragments_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose output is full of broken UTF-8."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "fragments", bytes_and_pieces())


@pytest.fixture(scope="session")
def fragments(fragments_dir: Path) -> Iterator[ServedModel]:
    """Its server: the full pool is so large that the SWA pool is always the fuller one."""
    pools = ("--max-total-tokens", "100000", "--swa-total-tokens", "1024")
    with serve_ready(fragments_dir, "--page-size", "4", *pools) as served:
        yield served
        served.flush()
