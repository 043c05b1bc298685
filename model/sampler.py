"""Choose one token per row of logits: a pure function of row, draw and (seed, choice, position).

Rows whose draws ask for it are adjusted first, as copies (model/adjust.py).

Filters keep a prefix of the tokens by falling logit (lowest id first among equals), after temperature:

    top_k   the first k
    top_p   the shortest prefix of those whose renormalised probability reaches top_p
    min_p   those with at least min_p times the probability of the first

What is kept is then drawn from in order of token id with one uniform number. Order by id and float64 sums
keep the choice the same when logits differ by rounding, as they do between batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from forkpoint.configs.sampling import SamplingParams
from forkpoint.model.adjust import adjust, is_adjusted
from forkpoint.model.inputs import Draw, Draws
from forkpoint.model.outputs import RowFault

_TWO_TO_64 = 1 << 64

# top_p looks at this many of the highest logits first; usually they hold the whole nucleus.
_FIRST_NUCLEUS = 1024
# Scores are divided by the temperature in float32, where smaller ones would be 0. Two logits that differ at
# all differ by far more than this.
_LOWEST_TEMPERATURE = 1e-30


def sample(logits: torch.Tensor, draws: Draws) -> tuple[NDArray[np.int64], dict[int, RowFault]]:
    """Choose a token for each row of logits [S, V] float32; draws[i] says how for row i.

    Returns the tokens [S], and by row what kept a token from being chosen. Temperature 0 takes the highest
    logit, the lowest id among equals. Rows do not influence each other. Does not change `logits`.
    """
    if not draws:
        return np.empty(0, dtype=np.int64), {}
    tokens, highest = _greedy(logits)
    faults = {int(row): RowFault.DAMAGED for row in np.flatnonzero(~np.isfinite(highest))}
    sound = {row: draw for row, draw in enumerate(draws) if row not in faults}
    adjusted = [row for row, draw in sound.items() if is_adjusted(draw)]
    if adjusted:
        own = logits[adjusted]
        own_draws = [sound.pop(row) for row in adjusted]
        adjust(own, own_draws)
        own_tokens, highest = _greedy(own)
        is_empty = np.isneginf(highest)
        _draw_random(own, {i: draw for i, draw in enumerate(own_draws) if not is_empty[i]}, own_tokens)
        tokens[adjusted] = own_tokens
        faults |= {adjusted[i]: RowFault.NOTHING_ALLOWED for i in np.flatnonzero(is_empty)}
    _draw_random(logits, sound, tokens)
    return tokens, faults


def uniform(seed: int, choice: int, position: int) -> float:
    """The random number in [0, 1) of one choice of token; the same on every machine (Philox 4x64)."""
    key = np.array([seed % _TWO_TO_64, choice % _TWO_TO_64], dtype=np.uint64)
    raw = np.random.Philox(key=key, counter=position).random_raw()
    return float(int(raw) >> 11) * 2.0**-53


def _greedy(logits: torch.Tensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The highest logit of each row: its id, the lowest among equals, and its value (NaN if there is one)."""
    if logits.device.type == "cpu":
        # numpy's argmax is vectorised, torch's is not: 262,144 logits in 0.05 ms against 1.
        scores = logits.numpy()
        tokens: NDArray[np.int64] = scores.argmax(axis=-1)
        return tokens, scores[np.arange(len(scores)), tokens]
    values, ids = logits.max(dim=-1)
    return ids.cpu().numpy(), values.cpu().numpy()


def _draw_random(logits: torch.Tensor, draws: Mapping[int, Draw], tokens: NDArray[np.int64]) -> None:
    """Put a drawn token in the place of each row of `draws` that has a temperature."""
    rows = [row for row, draw in draws.items() if draw.params.temperature > 0.0]
    if not rows:
        return
    # On the CPU rows are read where they are; from elsewhere they come in one copy.
    scores = logits if logits.device.type == "cpu" else logits[rows].cpu()
    for index, row in enumerate(rows):
        row_scores = scores[row if scores is logits else index]
        tokens[row] = _sample_row(row_scores.numpy(), draws[row])


def _sample_row(logits: NDArray[np.float32], draw: Draw) -> int:
    ids = _kept_ids(logits, draw.params)
    weights = _weights(logits if ids is None else logits[ids], draw.params.temperature)
    index = _inverse_cdf(weights, uniform(draw.params.seed, draw.choice, draw.position))
    return index if ids is None else int(ids[index])


def _weights(logits: NDArray[np.float32], temperature: float) -> torch.Tensor:
    """Unnormalised probabilities, float32; the largest is 1. In torch, whose exp is vectorised."""
    scores = torch.from_numpy(logits - logits.max())
    return (scores / max(temperature, _LOWEST_TEMPERATURE)).exp_()


def _inverse_cdf(weights: torch.Tensor, uniform: float) -> int:
    """First index whose cumulative weight exceeds uniform * total."""
    cumulative = weights.cumsum(0, dtype=torch.float64)
    # Strictly below the total even when the product rounds up to it, so that an index is always found
    # and never one of weight 0 (its cumulative weight does not exceed its predecessor's).
    total = float(cumulative[-1])
    target = min(uniform * total, math.nextafter(total, 0.0))
    return int(np.searchsorted(cumulative.numpy(), target, side="right"))


def _kept_ids(logits: NDArray[np.float32], params: SamplingParams) -> NDArray[np.int64] | None:
    """Ids that survive the filters, ascending; None if no filter is on."""
    num_tokens = len(logits)
    has_top_k = 0 < params.top_k < num_tokens
    if not (has_top_k or params.top_p < 1.0 or params.min_p > 0.0):
        return None
    num_candidates = params.top_k if has_top_k else num_tokens
    limit = num_candidates
    if params.min_p > 0.0:
        floor = float(logits.max()) + params.temperature * math.log(params.min_p)
        limit = min(limit, max(1, int(np.count_nonzero(logits.astype(np.float64) >= floor))))
    if params.top_p < 1.0:
        limit = _nucleus(logits, params, limit, num_candidates)
    return _highest(logits, limit)


def _nucleus(logits: NDArray[np.float32], params: SamplingParams, limit: int, num_candidates: int) -> int:
    """Length, at most `limit`, of the shortest prefix with top_p of the candidates' probability."""
    candidates = logits if num_candidates == len(logits) else _sorted_logits(logits, num_candidates)
    target = params.top_p * float(_weights(candidates, params.temperature).sum(dtype=torch.float64))
    for size in (min(limit, _FIRST_NUCLEUS), limit):
        weights = _weights(_sorted_logits(logits, size), params.temperature)
        cumulative = weights.cumsum(0, dtype=torch.float64).numpy()
        if cumulative[-1] >= target:
            return int(np.searchsorted(cumulative, target, side="left")) + 1
    return limit


def _sorted_logits(logits: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    """The `count` highest, falling."""
    highest = logits if count == len(logits) else np.partition(logits, len(logits) - count)[-count:]
    return np.sort(highest)[::-1]


def _highest(logits: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Ids of the `count` highest logits, ascending; of equals at the end the lowest ids."""
    threshold = np.partition(logits, len(logits) - count)[len(logits) - count]
    num_above = np.count_nonzero(logits > threshold)
    ids = np.flatnonzero(logits >= threshold)
    is_equal = logits[ids] == threshold
    kept: NDArray[np.int64] = ids[~is_equal | (np.cumsum(is_equal) <= count - num_above)]
    return kept
