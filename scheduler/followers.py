"""When a request should wait because another computes, right now, what it would have to compute itself."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from forkpoint.cache import Match
from forkpoint.scheduler.plan import Span
from forkpoint.scheduler.sequence import Sequence

# Sharing less than this is not worth a step of waiting.
MIN_SHARED_TOKENS = 32


def is_computed_by(chunks: Iterable[Span], sequence: Sequence, match: Match, page_size: int) -> bool:
    """Whether a prefill or rebuild that runs rows in this step is ahead of `sequence` on a shared prefix.

    chunks: the step's spans that are no decode rows.
    Only a prefill with rows in this very step counts: one that was aborted, retracted or is stalled holds
    nobody up. Judged anew in each step, so that nothing must wake a follower.
    """
    if sequence.is_scoring:
        return False  # it computes everything itself
    least = max(page_size, MIN_SHARED_TOKENS)
    return any(
        _shares(span.sequence, sequence, match.full_len + least, span.sequence.prefill_end)
        or _rebuilds_for(span, sequence, match, least)
        for span in chunks
        if span.sequence.namespace == sequence.namespace
    )


def _rebuilds_for(span: Span, sequence: Sequence, match: Match, least: int) -> bool:
    """Whether the span belongs to a rebuild of a window that this request lacks too."""
    if match.branch_point is None or span.start >= span.lease.full_hit:
        return False
    return _shares(span.sequence, sequence, match.resume_len + least, span.lease.full_hit)


def _shares(leader: Sequence, follower: Sequence, length: int, upto: int) -> bool:
    """Whether both begin with the same `length` tokens, which one computes and the other may reuse."""
    if length > min(upto, follower.num_tokens - 1):
        return False
    # The last tokens differ first in requests that fork: look there before at all of them.
    tail = slice(max(0, length - MIN_SHARED_TOKENS), length)
    if not np.array_equal(leader.tokens[tail], follower.tokens[tail]):
        return False
    return np.array_equal(leader.tokens[:length], follower.tokens[:length])
