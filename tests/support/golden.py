"""What tests against transformers' logits share: a loaded model, a poisoned world, prompts, errors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from support.paged import PagedSequence, PagedWorld
from support.tiny_checkpoints import VOCAB_SIZE, WINDOW

from forkpoint.model.load import Model, load_model
from forkpoint.model.runner import ModelRunner

# Float32 sums in another order: transformers differs from itself by up to 4e-5 between its own paths.
TOLERANCE = 1e-4
PROMPT_LENGTH = 8 * WINDOW + 5

Checkpoints = Mapping[str, Path]


@lru_cache
def float32_model(model_dir: Path) -> Model:
    return load_model(model_dir, dtype="float32", device="cpu")


def poisoned_world(model: Model, *, page_size: int, backend: str, num_slots: int = 768) -> PagedWorld:
    """Pools full of NaN: what is read before it is written shows."""
    num_pages = num_slots // page_size
    runner = ModelRunner(
        model,
        num_pages={"full": num_pages, "swa": num_pages},
        page_size=page_size,
        attention_backend=backend,
    )
    world = PagedWorld(runner, page_size)
    world.poison_all()
    return world


def random_prompt(seed: int, length: int = PROMPT_LENGTH) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB_SIZE, length)]


def run_in_chunks(world: PagedWorld, tokens: list[int], chunk: int) -> PagedSequence:
    """A sequence that has run all of `tokens`, and gave up what left its window."""
    sequence = world.sequence(tokens)
    while sequence.num_computed < len(tokens):
        world.step([(sequence, min(chunk, len(tokens) - sequence.num_computed))])
        world.drop_out_of_window(sequence)
    return sequence


def largest_error(sequence: PagedSequence, reference: torch.Tensor, *, start: int = 0) -> float:
    """Of the logits of all rows that the sequence has run, from position `start` on."""
    return float((torch.cat(sequence.logits) - reference[start : sequence.num_computed]).abs().max())
