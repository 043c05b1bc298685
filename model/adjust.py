"""What requests add to logits and take out of them before a token is chosen: bias, penalties, masks.

Each of them is one indexed operation for all rows that ask for it. Bias comes first, then the repetition
penalty, then frequency and presence penalties, then the masks, which make a logit -inf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from forkpoint.model.inputs import Draw, Draws

# A penalised logit stays within this, so that differences of two are finite in float32.
_LARGEST_LOGIT = 1e38


def is_adjusted(draw: Draw) -> bool:
    """Whether adjust() would change this draw's row."""
    params = draw.params
    return bool(
        params.logit_bias
        or draw.mask is not None
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or (draw.num_generated < params.min_tokens and params.stop_token_ids)
    )


def adjust(logits: torch.Tensor, draws: Draws) -> None:
    """Change logits [S, V] float32 in place as the draws ask; rows do not influence each other."""
    _add_bias(logits, draws)
    _penalise_repetition(logits, draws)
    _penalise_use(logits, draws)
    _mask_stop_tokens(logits, draws)
    _apply_masks(logits, draws)


Entries = tuple[NDArray[np.int64], NDArray[np.float64]]


def _gather(
    draws: Draws, entries: Callable[[Draw], Entries | None], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """(rows, token ids, values) of what `entries` gives for each draw, flat; None if it gives nothing."""
    found = [(row, given) for row, draw in enumerate(draws) if (given := entries(draw)) is not None]
    if not found:
        return None
    rows = np.repeat([row for row, _ in found], [len(ids) for _, (ids, _) in found])
    ids = np.concatenate([ids for _, (ids, _) in found])
    values = np.concatenate([values for _, (_, values) in found])
    places = torch.from_numpy(np.stack([rows, ids])).to(device)
    return places[0], places[1], torch.from_numpy(values).to(device)


def _add_bias(logits: torch.Tensor, draws: Draws) -> None:
    def entries(draw: Draw) -> Entries | None:
        if not draw.params.logit_bias:
            return None
        ids, values = zip(*draw.params.logit_bias, strict=True)
        return np.array(ids, dtype=np.int64), np.array(values, dtype=np.float64)

    if (given := _gather(draws, entries, logits.device)) is not None:
        rows, ids, values = given
        logits.index_put_((rows, ids), values.float(), accumulate=True)


def _penalise_repetition(logits: torch.Tensor, draws: Draws) -> None:
    def entries(draw: Draw) -> Entries | None:
        penalty = draw.params.repetition_penalty
        if penalty == 1.0:
            return None
        return draw.token_ids.astype(np.int64), np.full(len(draw.token_ids), penalty)

    if (given := _gather(draws, entries, logits.device)) is not None:
        rows, ids, penalties = given
        before = logits[rows, ids].double()
        after = torch.where(before > 0, before / penalties, before * penalties)
        after = torch.where(before.isfinite(), after.clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT), before)
        # A token that occurs twice is written twice, with the same value: it was read before.
        logits[rows, ids] = after.float()


def _penalise_use(logits: torch.Tensor, draws: Draws) -> None:
    def entries(draw: Draw) -> Entries | None:
        params = draw.params
        if not (params.presence_penalty or params.frequency_penalty):
            return None
        ids, counts = np.unique(draw.token_ids[draw.prompt_len :], return_counts=True)
        penalties = params.presence_penalty + counts.astype(np.float64) * params.frequency_penalty
        return ids.astype(np.int64), penalties.astype(np.float64)

    if (given := _gather(draws, entries, logits.device)) is not None:
        rows, ids, penalties = given
        logits[rows, ids] -= penalties.float()


def _mask_stop_tokens(logits: torch.Tensor, draws: Draws) -> None:
    def entries(draw: Draw) -> Entries | None:
        stop_ids = draw.params.stop_token_ids
        if draw.num_generated >= draw.params.min_tokens or not stop_ids:
            return None
        return np.fromiter(stop_ids, dtype=np.int64), np.full(len(stop_ids), -np.inf)

    if (given := _gather(draws, entries, logits.device)) is not None:
        rows, ids, values = given
        logits[rows, ids] = values.float()


def _apply_masks(logits: torch.Tensor, draws: Draws) -> None:
    rows = [row for row, draw in enumerate(draws) if draw.mask is not None]
    if not rows:
        return
    is_allowed = _unpack((draw.mask for draw in draws if draw.mask is not None), logits)
    if len(rows) == len(logits):
        logits.masked_fill_(~is_allowed, -torch.inf)
    else:
        logits[rows] = logits[rows].masked_fill_(~is_allowed, -torch.inf)


def _unpack(masks: Iterable[NDArray[np.int32]], logits: torch.Tensor) -> torch.Tensor:
    """[R, V] bool of R masks, on the device of `logits`."""
    packed = np.stack(list(masks)).view(np.uint8)
    num_tokens = logits.shape[-1]
    if logits.device.type == "cpu":
        # numpy unpacks 32 rows of 262,144 bits in 0.6 ms; torch, which has shifts only, takes 24.
        bits = np.unpackbits(packed, axis=-1, count=num_tokens, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    bytes_ = torch.from_numpy(packed).to(logits.device)
    return ((bytes_[:, :, None] >> shifts) & 1).flatten(1)[:, :num_tokens].bool()
