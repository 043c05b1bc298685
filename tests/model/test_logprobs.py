"""Log-probabilities equal transformers' log-softmax; the top ones are exact and in a fixed order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paged import PagedWorld
from support.tiny_checkpoints import VOCAB_SIZE, reference_logits

from forkpoint.configs.sampling import SamplingParams
from forkpoint.model import runner as runner_module
from forkpoint.model.inputs import Draw, ScoredRows
from forkpoint.model.load import load_model
from forkpoint.model.logprobs import token_logprobs
from forkpoint.model.runner import ModelRunner


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.lists(st.integers(-6, 6), min_size=30, max_size=30), min_size=1, max_size=4),
    num_top=st.integers(0, 40),
)
def test_the_top_is_exact_with_the_lowest_id_first_among_equals(
    values: list[list[int]], num_top: int
) -> None:
    logits = np.array(values, dtype=np.float32)
    result = token_logprobs(torch.from_numpy(logits), np.zeros(len(values), dtype=np.int64), num_top)
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :num_top]
    assert np.array_equal(result.top_ids, order)
    np.testing.assert_allclose(result.top_logprobs, np.take_along_axis(expected, order, -1), atol=1e-5)
    np.testing.assert_allclose(result.token_logprobs, expected[:, 0], atol=1e-5)


def test_logits_are_not_changed_and_huge_ones_do_not_overflow() -> None:
    logits = torch.tensor([[3e38, 0.0, -3e38, -torch.inf], [1e4, 1e4, -1e4, 0.0]])
    before = logits.clone()
    result = token_logprobs(logits, np.array([3, 1]), 2)
    assert torch.equal(logits, before)
    assert result.token_logprobs[0] == -np.inf
    np.testing.assert_allclose(result.top_logprobs[0], [0.0, -3e38])
    assert result.top_ids.tolist() == [[0, 1], [0, 1]]
    np.testing.assert_allclose(result.top_logprobs[1], -np.log(2), atol=1e-3)


@pytest.mark.parametrize("damage", [float("nan"), float("inf")])
def test_a_damaged_row_shows_and_its_neighbour_does_not(damage: float) -> None:
    logits = torch.zeros(2, 10)
    logits[0, 4] = damage
    result = token_logprobs(logits, np.array([1, 1]), 3)
    assert result.is_damaged and not result.part(1, 2, 3).is_damaged


def test_sampled_tokens_and_prompt_scores_equal_transformers(
    checkpoints: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Blocks of three rows, so that a batch of scored rows takes several.
    monkeypatch.setattr(runner_module, "SCORED_LOGITS_BYTES", 3 * 4 * VOCAB_SIZE)
    model = load_model(checkpoints["gemma3"], dtype="float32", device="cpu")
    runner = ModelRunner(model, num_pages={"full": 64, "swa": 64}, page_size=4)
    tokens = [int(token) for token in np.random.default_rng(7).integers(0, VOCAB_SIZE, 40)]
    world = PagedWorld(runner, page_size=4)
    inputs = world.inputs([(world.sequence(tokens), 40), (world.sequence(tokens[:9]), 9)])
    scored = ScoredRows(np.arange(39), np.array(tokens[1:], dtype=np.int32), num_top=5)
    inputs = replace(inputs, sample_rows=np.array([39, 48]), scored=scored)
    # Bias and temperature come after the logprobs.
    bias = tuple((token, 50.0) for token in (17, 18))
    params = SamplingParams(seed=1, max_tokens=4, temperature=2.0, logit_bias=bias, num_logprobs=3)
    output = runner.step(inputs, [Draw(params, 0, 40), Draw(replace(params, num_logprobs=None), 0, 9)])
    assert output.tokens[0] in (17, 18) and output.logprobs.keys() == {0}
    expected = torch.log_softmax(reference_logits(checkpoints["gemma3"], tokens), -1).numpy()
    own = output.logprobs[0]
    assert own.top_ids.shape == (1, 3)
    # The golden tests hold logits within 1e-4 of transformers.
    np.testing.assert_allclose(own.token_logprobs[0], expected[39, output.tokens[0]], atol=2e-4)
    np.testing.assert_allclose(own.top_logprobs[0], np.sort(expected[39])[::-1][:3], atol=2e-4)
    assert output.scores is not None and len(output.scores) == 39
    np.testing.assert_allclose(output.scores.token_logprobs, expected[np.arange(39), tokens[1:]], atol=2e-4)
    np.testing.assert_allclose(
        output.scores.top_logprobs, np.sort(expected[:39], axis=-1)[:, ::-1][:, :5], atol=2e-4
    )
