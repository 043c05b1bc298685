"""Compares greedy outputs of two servers, knowing that float32 sums depend on their order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from support.tiny_checkpoints import reference_logits

# The golden tests hold each run within 1e-4 of transformers, so two runs within twice that of each other.
TIE = 2e-4


def differ_beyond_ties(
    model_dir: Path, prompt: Sequence[int], one: Sequence[int], other: Sequence[int]
) -> bool:
    """Whether two greedy continuations differ for another reason than a tie at their first difference.

    What a batch holds beside a row moves its logits by about 1e-6, so equal outputs cannot be had where
    transformers' own logits of the two tokens are that close; everything after such a place may differ.
    """
    if list(one) == list(other):
        return False
    length = min(len(one), len(other))
    where = next((i for i in range(length) if one[i] != other[i]), None)
    if where is None:
        return True
    logits = reference_logits(model_dir, [*prompt, *one[:where]])[-1]
    return max(float(logits.max() - logits[tokens[where]]) for tokens in (one, other)) > TIE
