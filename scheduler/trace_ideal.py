"""What a cache without limits would serve of each prompt of a trace."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from forkpoint.cache import page_floor
from forkpoint.scheduler.traces import Tokens, TraceRequest

# Big-endian, so that bytes sort as the tokens do.
_SORTABLE = np.dtype(">u4")


def ideal_hits(requests: Sequence[TraceRequest], page_size: int) -> list[int]:
    """Per request, the longest prefix in whole pages that it shares with any earlier request, in tokens.

    An earlier request counts with all that was computed for it. Of a prompt at least one token is not served.
    """
    hits: list[int] = []
    # Of all sequences seen so far, a neighbour in sorted order shares the longest prefix.
    seen: list[bytes] = []
    for request in requests:
        prompt = _sortable(request.prompt)
        at = bisect_left(seen, prompt)
        shared = max((_common_prefix(prompt, other) for other in seen[max(0, at - 1) : at + 1]), default=0)
        hits.append(page_floor(min(shared, len(request.prompt) - 1), page_size))
        insort(seen, _sortable(request.computed_tokens))
    return hits


def _sortable(tokens: Tokens) -> bytes:
    return tokens.astype(_SORTABLE).tobytes()


def _common_prefix(first: bytes, second: bytes) -> int:
    """How many tokens two sortable sequences share from their start."""
    length = min(len(first), len(second)) // _SORTABLE.itemsize
    differs = np.frombuffer(first, _SORTABLE, length) != np.frombuffer(second, _SORTABLE, length)
    return int(differs.argmax()) if differs.any() else length
