"""Choose one token per row of logits: a pure function of row, parameters and (seed, choice, position).

Filters keep a prefix of the tokens by falling logit (lowest id first among equals), after temperature:

    top_k   the first k
    top_p   the shortest prefix of those whose renormalised probability reaches top_p
    min_p   those with at least min_p times the probability of the first

What is kept is then drawn from in order of token id with one uniform number. Order by id and float64 sums
keep the choice the same when logits differ by rounding, as they do between batches.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from forkpoint.configs.sampling import SamplingParams
from forkpoint.model.inputs import Draw, Draws

_TWO_TO_64 = 1 << 64
# top_p looks at this many of the highest logits first; usually they hold the whole nucleus.
_FIRST_NUCLEUS = 1024


def sample(logits: torch.Tensor, draws: Draws) -> NDArray[np.int64]:
    """Choose a token for each row of logits [S, V] float32; draws[i] says how for row i. Returns [S].

    Temperature 0 takes the highest logit, the lowest id among equals. Rows do not influence each other.
    Raises FloatingPointError if a row's highest logit is not finite.
    """
    if not draws:
        return np.empty(0, dtype=np.int64)
    highest, greedy = logits.max(dim=-1)
    _require_finite(highest)
    tokens: NDArray[np.int64] = greedy.cpu().numpy().copy()
    random_rows = [row for row, draw in enumerate(draws) if draw.params.temperature > 0.0]
    if random_rows:
        scores = (logits if len(random_rows) == len(draws) else logits[random_rows]).cpu()
        for row, row_scores in zip(random_rows, scores, strict=True):
            tokens[row] = _sample_row(row_scores, draws[row])
    return tokens


def uniform(seed: int, choice: int, position: int) -> float:
    """The random number in [0, 1) of one choice of token; the same on every machine (Philox 4x64)."""
    key = np.array([seed % _TWO_TO_64, choice % _TWO_TO_64], dtype=np.uint64)
    raw = np.random.Philox(key=key, counter=position).random_raw()
    return float(int(raw) >> 11) * 2.0**-53


def _require_finite(highest: torch.Tensor) -> None:
    finite = torch.isfinite(highest)
    if not finite.all():
        row = int(torch.nonzero(~finite)[0])
        raise FloatingPointError(
            f"the highest logit of sample row {row} is {float(highest[row])}; "
            "weights or cached state are damaged"
        )


def _sample_row(logits: torch.Tensor, draw: Draw) -> int:
    ids = _kept_ids(logits, draw.params)
    weights = _weights(logits if ids is None else logits[ids], draw.params.temperature)
    index = _inverse_cdf(weights, uniform(draw.params.seed, draw.choice, draw.position))
    return index if ids is None else int(ids[index])


def _weights(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Unnormalised probabilities in float64; the largest is 1."""
    scores = logits.double()
    return ((scores - scores.max()) / temperature).exp_()


def _inverse_cdf(weights: torch.Tensor, uniform: float) -> int:
    """First index whose cumulative weight exceeds uniform * total."""
    cumulative = weights.cumsum(0)
    # Strictly below the total even when the product rounds up to it, so that an index is always found
    # and never one of weight 0 (its cumulative weight does not exceed its predecessor's).
    total = float(cumulative[-1])
    target = min(uniform * total, math.nextafter(total, 0.0))
    return int(torch.searchsorted(cumulative, target, right=True))


def _kept_ids(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor | None:
    """Ids that survive the filters, ascending; None if no filter is on."""
    num_tokens = len(logits)
    has_top_k = 0 < params.top_k < num_tokens
    if not (has_top_k or params.top_p < 1.0 or params.min_p > 0.0):
        return None
    limit = params.top_k if has_top_k else num_tokens
    if params.min_p > 0.0:
        floor = float(logits.max()) + params.temperature * math.log(params.min_p)
        limit = min(limit, max(1, int((logits.double() >= floor).sum())))
    if params.top_p < 1.0:
        limit = _nucleus(logits, params, limit, params.top_k if has_top_k else num_tokens)
    return _highest(logits, limit).sort().values


def _nucleus(logits: torch.Tensor, params: SamplingParams, limit: int, num_candidates: int) -> int:
    """Length, at most `limit`, of the shortest prefix with top_p of the candidates' probability."""
    size = min(limit, _FIRST_NUCLEUS)
    if num_candidates == len(logits):
        total = float(_weights(logits, params.temperature).sum())
    else:
        highest = _sorted_logits(logits, num_candidates)
        total = float(_weights(highest, params.temperature).sum())
    while True:
        cumulative = _weights(_sorted_logits(logits, size), params.temperature).cumsum(0)
        if size == limit or float(cumulative[-1]) >= params.top_p * total:
            reached = int(torch.searchsorted(cumulative, params.top_p * total, right=False)) + 1
            return min(reached, size)
        size = min(limit, size * 8)


def _sorted_logits(logits: torch.Tensor, count: int) -> torch.Tensor:
    return torch.topk(logits, count, sorted=True).values


def _highest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the `count` highest logits, lowest ids first among equals; in no particular order."""
    threshold = torch.topk(logits, count, sorted=True).values[-1]
    above = torch.nonzero(logits > threshold).flatten()
    equal = torch.nonzero(logits == threshold).flatten()[: count - len(above)]
    return torch.cat((above, equal))
