"""Which sequences wait and which run. Every change of a sequence's phase goes through here, pages too."""

from __future__ import annotations

from collections import deque

from forkpoint.cache import Match, PrefixCache
from forkpoint.scheduler.events import SchedulerCounters, StepEvents
from forkpoint.scheduler.messages import Finish, FinishReason, Started
from forkpoint.scheduler.sequence import Sequence


class Roster:
    """All unfinished sequences of one engine. Mutable; only the scheduler's parts change it.

    waiting: first come first served, without a lease. running: in order of admission, each with a lease.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.counters = SchedulerCounters()
        self.events = StepEvents()
        self._cache = cache
        self._by_uid: dict[int, Sequence] = {}

    def find(self, uid: int) -> Sequence | None:
        """None for one that ended, or never was."""
        return self._by_uid.get(uid)

    def enter(self, sequence: Sequence) -> None:
        """A new sequence waits."""
        assert sequence.uid not in self._by_uid, f"uid {sequence.uid} is in use"
        self._by_uid[sequence.uid] = sequence
        self.waiting.append(sequence)

    def run(self, sequence: Sequence, match: Match) -> None:
        """A sequence that the caller took from the queue borrows its hit and runs."""
        self.acquire(sequence, match)
        sequence.prefill_end = sequence.num_tokens
        self.running.append(sequence)

    def acquire(self, sequence: Sequence, match: Match) -> None:
        """Give a sequence a lease on `match`; one that it has stays open, and is the caller's to release."""
        lease = self._cache.acquire(match, prompt_len=sequence.prompt_len, anchors=sequence.anchors)
        sequence.lease = lease
        sequence.num_computed = lease.start

    def account(self, sequence: Sequence, *, cached: int, rebuilt: int) -> None:
        """Tell which tokens of the prompt need not be computed, at first admission and at jumps after it."""
        assert sequence.queue_time_s is not None
        sequence.num_cached += cached
        sequence.num_rebuilt += rebuilt
        self.counters.cached_tokens += cached
        self.counters.rebuilt_tokens += rebuilt
        self.events.started.append(
            Started(sequence.uid, sequence.num_cached, sequence.num_rebuilt, sequence.queue_time_s)
        )

    def retract(self, sequence: Sequence) -> None:
        """A running sequence gives its pages back and is the next to run again."""
        self._release(sequence)
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        self.counters.retractions += 1

    def end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        stop_token_id: int | None = None,
        message: str | None = None,
        is_own_fault: bool = False,
    ) -> None:
        """A sequence ends in whatever phase it is."""
        if sequence.lease is not None:
            self._release(sequence)
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        del self._by_uid[sequence.uid]
        self.events.finished.append(Finish(sequence.uid, reason, stop_token_id, message, is_own_fault))

    def take_events(self) -> StepEvents:
        """What happened since the last call; the caller owns it."""
        events, self.events = self.events, StepEvents()
        return events

    def _release(self, sequence: Sequence) -> None:
        assert sequence.lease is not None
        self._cache.release(sequence.lease, sequence.tokens, sequence.num_computed)
        sequence.lease = None
        sequence.num_computed = 0
