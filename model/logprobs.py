"""Log-probabilities of tokens from raw logits, for a whole batch of rows at once."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from forkpoint.model.outputs import TokenLogprobs


def token_logprobs(logits: torch.Tensor, token_ids: NDArray[np.integer], num_top: int) -> TokenLogprobs:
    """Log-softmax of logits [N, V] float32 at token_ids [N], and at the num_top highest of each row.

    Does not change `logits`. Takes one more [N, V] float32 of memory. A row with NaN or +inf, or with nothing
    but -inf, is NaN in all its places.
    """
    if not len(logits):
        return TokenLogprobs.none(num_top)
    highest = logits.amax(dim=-1, keepdim=True)
    # exp() in place: torch.logsumexp would take twice the memory and 1.4 times as long.
    total = (logits - highest).exp_().sum(dim=-1, keepdim=True)
    normaliser = highest + total.log_()
    chosen = torch.from_numpy(token_ids.astype(np.int64)).to(logits.device)[:, None]
    num_top = min(num_top, logits.shape[-1])
    ids, scores = _highest(logits, num_top)
    # One copy to the host for all of it.
    columns = torch.cat([logits.gather(-1, chosen), scores], dim=-1) - normaliser
    columns[~torch.isfinite(normaliser).squeeze(-1)] = torch.nan
    values: NDArray[np.float32] = columns.cpu().numpy()
    return TokenLogprobs(values[:, 0], ids.cpu().numpy().astype(np.int32), values[:, 1:])


def _highest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and values [N, count] of the highest of each row, falling, the lowest id first among equals."""
    num_tokens = logits.shape[-1]
    if count == 0:
        return logits.new_empty((len(logits), 0), dtype=torch.int64), logits[:, :0]
    # One more than wanted: it shows whether equals lie on both sides of the cut. topk() promises no order
    # among equals, and takes any of them.
    values, ids = logits.topk(min(count + 1, num_tokens), dim=-1)
    if count < num_tokens:
        for row in torch.nonzero(values[:, count - 1] == values[:, count]).flatten().tolist():
            least = values[row, count - 1]
            above = torch.nonzero(logits[row] > least).flatten()
            equal = torch.nonzero(logits[row] == least).flatten()
            ids[row, :count] = torch.cat([above, equal])[:count]
    ids = ids[:, :count].sort(dim=-1).values
    values, order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return ids.gather(-1, order), values
