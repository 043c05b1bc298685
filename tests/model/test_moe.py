"""Mixture of experts: every row gets its experts, and no expert computes more than its rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forkpoint.model.config import MoeSpec
from forkpoint.model.moe import MoeMlp, Router

HIDDEN = 5


def _spec(**different: object) -> MoeSpec:
    fields = {
        "num_experts": 8,
        "experts_per_token": 3,
        "expert_dim": 1,
        "scoring": "softmax",
        "is_renormalised": True,
    }
    return MoeSpec(**{**fields, **different})  # type: ignore[arg-type]


def _router(spec: MoeSpec, *, seed: int = 0) -> Router:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn((spec.num_experts, HIDDEN), generator=generator)
    bias = torch.randn(spec.num_experts, generator=generator) if spec.has_router_bias else None
    correction = torch.randn(spec.num_experts, generator=generator) if spec.has_correction_bias else None
    return Router(spec, weight, bias, correction)


class _CountingExpert:
    """Multiplies by a number of its own and counts the rows that it is given."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.calls: list[int] = []

    def __call__(self, x: torch.Tensor, *, is_decode: bool = False) -> torch.Tensor:
        self.calls.append(len(x))
        return x * self.factor


@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.integers(1, 20),
    num_experts=st.sampled_from([2, 8, 30]),
    per_token=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_rows_are_weighed_sums_of_their_experts(
    num_rows: int, num_experts: int, per_token: int, seed: int
) -> None:
    spec = _spec(num_experts=num_experts, experts_per_token=per_token)
    router = _router(spec, seed=seed)
    experts = [_CountingExpert(factor=1.0 + index) for index in range(num_experts)]
    x = torch.randn((num_rows, HIDDEN), generator=torch.Generator().manual_seed(seed))
    result = MoeMlp(router, experts)(x)
    chosen, weights = router(x)
    expected = x * (weights * (1.0 + chosen)).sum(dim=-1, keepdim=True)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
    for index, expert in enumerate(experts):
        count = int((chosen == index).sum())
        assert expert.calls == ([count] if count else []), "one call with its own rows, or none"


def test_one_row_runs_its_own_experts_only() -> None:
    experts = [_CountingExpert(1.0) for _ in range(8)]
    MoeMlp(_router(_spec()), experts)(torch.ones(1, HIDDEN))
    assert sorted(expert.calls for expert in experts) == [[]] * 5 + [[1]] * 3


def test_no_rows_give_no_rows() -> None:
    assert MoeMlp(_router(_spec()), [_CountingExpert(1.0)] * 8)(torch.empty(0, HIDDEN)).shape == (0, HIDDEN)


@pytest.mark.parametrize("scoring", ["softmax", "softmax_of_chosen"])
def test_softmax_weights_sum_to_one_where_they_should(scoring: str) -> None:
    x = torch.randn((6, HIDDEN), generator=torch.Generator().manual_seed(1))
    chosen, weights = _router(_spec(scoring=scoring))(x)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(6))
    # Both choose the same experts and weigh them alike: a renormalised softmax forgets the others.
    other = "softmax" if scoring == "softmax_of_chosen" else "softmax_of_chosen"
    torch.testing.assert_close(_router(_spec(scoring=other))(x), (chosen, weights))


def test_weights_that_are_not_renormalised_leave_the_others_their_share() -> None:
    x = torch.randn((6, HIDDEN), generator=torch.Generator().manual_seed(1))
    _, weights = _router(_spec(is_renormalised=False, weight_scale=2.0))(x)
    assert bool((weights.sum(dim=-1) < 2.0).all())


def test_correction_chooses_but_does_not_weigh() -> None:
    spec = _spec(scoring="sigmoid", is_renormalised=False, experts_per_token=2)
    weight = torch.zeros((8, HIDDEN))
    correction = torch.tensor([0.0, 5.0, 0.0, 4.0, 0.0, 0.0, 0.0, 0.0])
    chosen, weights = Router(spec, weight, None, correction)(torch.ones(1, HIDDEN))
    assert chosen.tolist() == [[1, 3]]
    assert weights.tolist() == [[0.5, 0.5]]


def test_groups_with_the_best_pairs_are_chosen_from() -> None:
    """The single best expert stands in a group that loses: groups count by their two best."""
    spec = _spec(
        scoring="sigmoid", is_renormalised=False, experts_per_token=2, num_groups=4, groups_per_token=1
    )
    scores = torch.tensor([[0.9, 0.1], [0.6, 0.7], [0.2, 0.3], [0.5, 0.5]]).flatten()
    router = Router(spec, torch.zeros((8, HIDDEN)), torch.logit(scores), None)
    chosen, weights = router(torch.ones(1, HIDDEN))
    assert chosen.tolist() == [[3, 2]]
    torch.testing.assert_close(weights, torch.tensor([[0.7, 0.6]]))
