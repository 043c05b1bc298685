"""Mixture of experts: a router that chooses experts for each row; experts that see their own rows only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from forkpoint.model.config import MoeSpec
from forkpoint.model.linear import GatedMlp


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses experts and their weights, in float32: a score that is rounded may choose another expert.

    weight: [E, hidden], bias, correction: [E] or None; all float32.
    """

    spec: MoeSpec
    weight: torch.Tensor
    bias: torch.Tensor | None
    correction: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [T, hidden]. Returns the experts of each row [T, k] int64 and their weights [T, k] float32."""
        spec = self.spec
        logits = F.linear(x.float(), self.weight, self.bias)
        if spec.scoring == "softmax_of_chosen":
            chosen, experts = logits.topk(spec.experts_per_token, dim=-1)
            weights = torch.softmax(chosen, dim=-1)
        else:
            scores = torch.softmax(logits, dim=-1) if spec.scoring == "softmax" else logits.sigmoid()
            experts = self._choose(scores)
            weights = scores.gather(1, experts)
        if spec.is_renormalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return experts, weights * spec.weight_scale

    def _choose(self, scores: torch.Tensor) -> torch.Tensor:
        spec = self.spec
        if self.correction is not None:
            scores = scores + self.correction
        if spec.num_groups > 1:
            by_group = scores.unflatten(1, (spec.num_groups, -1))
            group_scores = by_group.topk(2, dim=-1).values.sum(dim=-1)
            allowed = torch.zeros_like(group_scores, dtype=torch.bool)
            allowed.scatter_(1, group_scores.topk(spec.groups_per_token, dim=-1).indices, True)
            scores = by_group.masked_fill(~allowed[..., None], float("-inf")).flatten(1)
        return scores.topk(spec.experts_per_token, dim=-1).indices


class MoeMlp:
    """Rows sorted by expert: two matrix products for each expert that has rows, none for the others."""

    def __init__(self, router: Router, experts: Sequence[GatedMlp]) -> None:
        self._router = router
        self._experts = tuple(experts)

    def __call__(self, x: torch.Tensor, *, is_decode: bool = False) -> torch.Tensor:
        """x: [T, hidden]. Returns [T, hidden], same dtype."""
        chosen, weights = self._router(x)
        num_chosen = chosen.shape[1]
        by_expert = chosen.flatten().argsort(stable=True)
        rows = x.index_select(0, by_expert.div(num_chosen, rounding_mode="floor"))
        # The only wait for the device inside a layer: how many rows an expert has decides what is launched.
        counts = chosen.flatten().bincount(minlength=len(self._experts)).tolist()
        # Row i of the result is choice i % k of row i // k of x.
        results = torch.empty((len(by_expert), x.shape[1]), dtype=x.dtype, device=x.device)
        start = 0
        for expert, count in zip(self._experts, counts, strict=True):
            if count:
                end = start + count
                results.index_copy_(0, by_expert[start:end], expert(rows[start:end], is_decode=is_decode))
                start = end
        by_row = results.view(len(x), num_chosen, x.shape[1])
        return torch.bmm(weights.to(x.dtype)[:, None], by_row)[:, 0]
