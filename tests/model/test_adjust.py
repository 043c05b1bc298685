"""Bias, penalties and masks against a plain reference, row by row in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from forkpoint.configs.errors import RequestError
from forkpoint.configs.sampling import SamplingParams
from forkpoint.model.adjust import adjust, is_adjusted
from forkpoint.model.inputs import Draw
from forkpoint.model.outputs import RowFault
from forkpoint.model.sampler import sample

VOCAB_SIZE = 45


def packed(allowed: set[int], vocab_size: int = VOCAB_SIZE) -> NDArray[np.int32]:
    """A mask in which bit t of the whole says whether token t is allowed."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def reference(logits: NDArray[np.float64], draw: Draw, allowed: set[int] | None) -> NDArray[np.float64]:
    """Plain loops in float64."""
    row, params = logits.copy(), draw.params
    for token, value in params.logit_bias:
        row[token] += value
    tokens = draw.token_ids.tolist()
    generated = tokens[draw.prompt_len :]
    for token in set(tokens):
        penalty = params.repetition_penalty
        row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
    for token in set(generated):
        row[token] -= params.presence_penalty + params.frequency_penalty * generated.count(token)
    if len(generated) < params.min_tokens:
        row[list(params.stop_token_ids)] = -np.inf
    if allowed is not None:
        row[[token for token in range(len(row)) if token not in allowed]] = -np.inf
    return row


token_ids = st.integers(0, VOCAB_SIZE - 1)
adjustments = st.fixed_dictionaries(
    {},
    optional={
        "logit_bias": st.lists(st.tuples(token_ids, st.floats(-100, 100)), max_size=4).map(tuple),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.1, 5),
        "min_tokens": st.integers(0, 6),
        "stop_token_ids": st.frozensets(token_ids, max_size=3),
    },
)


@st.composite
def rows(draw: st.DrawFn) -> tuple[NDArray[np.float32], Draw, set[int] | None]:
    logits = draw(st.lists(st.integers(-40, 40), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE))
    tokens = draw(st.lists(token_ids, min_size=1, max_size=12))
    allowed = draw(st.none() | st.sets(token_ids, min_size=4))
    fields: dict[str, Any] = draw(adjustments)
    params = SamplingParams(seed=5, max_tokens=50, temperature=0.0, **fields)
    return (
        np.array(logits, dtype=np.float32) / np.float32(4),
        Draw(
            params,
            0,
            len(tokens),
            token_ids=np.array(tokens, dtype=np.int32),
            prompt_len=draw(st.integers(1, len(tokens))),
            mask=None if allowed is None else packed(allowed),
        ),
        allowed,
    )


@settings(max_examples=150, deadline=None)
@given(batch=st.lists(rows(), min_size=1, max_size=5))
def test_adjusted_rows_equal_a_plain_reference(
    batch: list[tuple[NDArray[np.float32], Draw, set[int] | None]],
) -> None:
    logits = torch.from_numpy(np.stack([row for row, _, _ in batch]))
    draws = [draw for _, draw, _ in batch]
    before = logits.clone()
    adjusted = logits.clone()
    adjust(adjusted, draws)
    tokens, faults = sample(logits, draws)
    assert torch.equal(logits, before), "the caller's logits are not to be changed"
    for index, (row, draw, allowed) in enumerate(batch):
        expected = reference(row.astype(np.float64), draw, allowed)
        # float32 of sums of up to 150.
        np.testing.assert_allclose(adjusted[index].numpy(), expected, atol=1e-4)
        if not is_adjusted(draw):
            assert torch.equal(adjusted[index], logits[index])
        if np.isneginf(expected).all():
            assert faults.pop(index) is RowFault.NOTHING_ALLOWED
        else:
            assert expected[tokens[index]] >= expected.max() - 1e-4
            assert tokens[index] == adjusted[index].argmax(), "argmax of what is left, the lowest id first"
    assert not faults


def _draw(position: int = 0, **params: Any) -> Draw:
    own = {name: params.pop(name) for name in ("token_ids", "prompt_len", "mask") if name in params}
    return Draw(SamplingParams(seed=3, max_tokens=20_000, **params), 0, position, **own)


def test_adjusted_rows_leave_their_neighbours_alone_in_every_mixture() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 200, generator=generator)
    tokens = np.arange(40, dtype=np.int32)
    draws = [
        _draw(40, temperature=0.9),
        _draw(40, temperature=0.9, logit_bias=((7, 5.0), (8, -100.0))),
        _draw(40, temperature=0.0),
        _draw(40, token_ids=tokens, prompt_len=10, presence_penalty=1.0, frequency_penalty=0.5),
        _draw(40, top_k=5, mask=packed(set(range(50, 90)), 200)),
        _draw(40, token_ids=tokens, prompt_len=10, repetition_penalty=1.3, temperature=0.0),
        _draw(40, token_ids=tokens, prompt_len=38, min_tokens=3, stop_token_ids=frozenset(range(150))),
        _draw(40, top_p=0.5, min_p=0.01),
        _draw(40, temperature=0.0, mask=packed({199}, 200)),
    ]
    together, faults = sample(logits, draws)
    alone = [int(sample(logits[row : row + 1], [draws[row]])[0][0]) for row in range(9)]
    backwards = sample(logits.flip(0), draws[::-1])[0].tolist()[::-1]
    assert not faults
    assert together.tolist() == alone == backwards
    assert 50 <= together[4] < 90 and together[6] >= 150 and together[8] == 199


def test_samples_follow_the_masked_distribution() -> None:
    """With a temperature, a mask renormalises what it leaves and changes nothing else."""
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(5)) * 1.5
    allowed = {1, 4, 9, 16, 25, 36}
    num_samples = 4000
    draws = [_draw(position, mask=packed(allowed, 40)) for position in range(num_samples)]
    tokens, _ = sample(logits.expand(num_samples, -1), draws)
    counts = np.bincount(tokens, minlength=40)
    weights = np.exp(logits[0].double().numpy()) * np.isin(np.arange(40), list(allowed))
    expected = weights / weights.sum() * num_samples
    assert counts[expected == 0].sum() == 0
    likely = expected > 0
    # 99.9 % point of chi-square with 5 degrees of freedom.
    assert ((counts - expected)[likely] ** 2 / expected[likely]).sum() < 20.5


def test_a_mask_that_leaves_nothing_fails_its_row_alone() -> None:
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    draws = [_draw(), _draw(mask=packed(set())), _draw(temperature=0.0)]
    tokens, faults = sample(logits, draws)
    assert faults == {1: RowFault.NOTHING_ALLOWED}
    assert [int(tokens[0]), int(tokens[2])] == [
        int(sample(logits[row : row + 1], [draws[row]])[0][0]) for row in (0, 2)
    ]


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e300, 1.7e308])
def test_the_largest_penalties_leave_finite_logits(penalty: float) -> None:
    logits = torch.tensor([[5.0, -5.0, 0.0, 1.0, -torch.inf]])
    draw = _draw(5, repetition_penalty=penalty, token_ids=np.arange(5, dtype=np.int32), prompt_len=1)
    adjusted = logits.clone()
    adjust(adjusted, [draw])
    assert torch.isfinite(adjusted[0, :4]).all() and adjusted[0, 4] == -torch.inf
    tokens, faults = sample(logits, [draw])
    assert not faults and 0 <= tokens[0] < 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 2.1),
        ("frequency_penalty", float("nan")),
        ("frequency_penalty", -2.01),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("repetition_penalty", float("nan")),
        ("logit_bias", ((3, 100.5),)),
        ("logit_bias", ((3, float("nan")),)),
        ("min_tokens", 11),
        ("min_tokens", -1),
        ("num_logprobs", 21),
        ("num_logprobs", -1),
        ("max_tokens", 0),
    ],
)
def test_values_out_of_range_are_refused(name: str, value: object) -> None:
    fields: dict[str, Any] = {"seed": 0, "max_tokens": 10, name: value}
    with pytest.raises(RequestError):
        SamplingParams(**fields)
