"""Lost windows of the demo model, rebuilt below a full hit: the answer of a cold run, and its bits."""

from __future__ import annotations

from pathlib import Path

import torch

from forkpoint.model.load import Model
from forkpoint.scheduler.rebuild_probe import PAGE_SIZE, RebuildProbe
from forkpoint.server.cli_measure_text import sample_token_ids
from forkpoint.server.text import Tokenizer

FULL_HIT = 1024  # two windows: starting one window too late would err by 3.5 in the logits here
NUM_NEW = 16


def test_a_rebuild_gives_the_greedy_tokens_and_the_bits_of_a_cold_run(demo_dir: Path, model: Model) -> None:
    token_ids = sample_token_ids(Tokenizer.load(demo_dir), FULL_HIT + PAGE_SIZE)
    probe = RebuildProbe(model, token_ids, num_new=NUM_NEW)
    cold, run = probe.cold(), probe.rebuilt(None)
    assert (cold.cached, cold.rebuilt) == (0, 0)
    assert (run.cached, run.rebuilt) == (0, FULL_HIT)
    assert run.tokens == cold.tokens
    assert torch.equal(run.logits, cold.logits)
    assert len(run.window) == 15
    for layer, tensors in run.window.items():
        for rebuilt, first in zip(tensors, cold.window[layer], strict=True):
            assert len(rebuilt) == 511
            assert torch.equal(rebuilt, first), f"layer {layer}"


def test_one_window_alone_is_far_off(demo_dir: Path, model: Model) -> None:
    token_ids = sample_token_ids(Tokenizer.load(demo_dir), 576 + PAGE_SIZE)
    probe = RebuildProbe(model, token_ids, num_new=1)
    cold, shallow = probe.cold(), probe.rebuilt(1)
    # page_floor(576 - 511): all but the first 64 tokens are rebuilt, and still it shows.
    assert (shallow.cached, shallow.rebuilt) == (64, 512)
    assert (shallow.logits - cold.logits).abs().max() > 0.01
