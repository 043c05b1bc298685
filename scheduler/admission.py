"""Whether the pools can take one more sequence beside those that run, without an early retraction."""

from __future__ import annotations

from collections.abc import Sequence as Items

from forkpoint.cache import Match, PrefixCache
from forkpoint.cache.pages import num_pages_for
from forkpoint.scheduler.limits import MIN_CHUNK_ROOM, SchedulerLimits
from forkpoint.scheduler.sequence import Sequence


class Admission:
    """Counts what running sequences will still need; decides nothing but yes or no. Holds no state."""

    def __init__(self, cache: PrefixCache, limits: SchedulerLimits) -> None:
        self._cache = cache
        self._limits = limits

    def fits(self, sequence: Sequence, match: Match, running: Items[Sequence]) -> bool:
        """Whether `sequence`, which would borrow `match`, fits beside `running` in both pools.

        Alone it always does: limits.check() has shown that.
        """
        return not running or (
            self._fits_full(sequence, match, running) and self._fits_swa(sequence, match, running)
        )

    def _fits_full(self, sequence: Sequence, match: Match, running: Items[Sequence]) -> bool:
        locked, _ = self._cache.pages_to_lock(match)
        needed = self._pages(sequence.num_tokens) - match.full_len // self._limits.geometry.page_size
        needed += self._decode_reserve(sequence) + sum(self._full_pages_to_come(other) for other in running)
        return needed + locked <= self._cache.full_use.available

    def _fits_swa(self, sequence: Sequence, match: Match, running: Items[Sequence]) -> bool:
        if self._limits.geometry.window is None:
            return True
        resting = sum(self._most_swa_pages(other) for other in [*running, sequence])
        room = min(sequence.num_tokens - match.resume_len, MIN_CHUNK_ROOM)
        return resting + self._pages(room) <= self._limits.swa_pages

    def _full_pages_to_come(self, sequence: Sequence) -> int:
        lease = sequence.lease
        assert lease is not None
        missing = self._pages(sequence.num_tokens) - lease.full_pages.length
        return max(0, missing) + self._decode_reserve(sequence)

    def _decode_reserve(self, sequence: Sequence) -> int:
        return self._pages(min(sequence.num_tokens_left, self._limits.reserved_decode_tokens))

    def _most_swa_pages(self, sequence: Sequence) -> int:
        longest = sequence.num_tokens + max(0, sequence.num_tokens_left)
        return min(self._limits.resting_swa_pages, self._pages(longest) + 1)

    def _pages(self, num_tokens: int) -> int:
        return num_pages_for(num_tokens, self._limits.geometry.page_size)
