"""Which rows run in the next step. Pages are reserved as rows are planned, so a plan can always run.

A step's order: decode rows of running sequences, oldest first; chunks of prefills in progress; then waiting
sequences, first come first served.
"""

from __future__ import annotations

import contextlib

from forkpoint.cache import OutOfPages, PrefixCache
from forkpoint.scheduler.arrivals import Arrivals
from forkpoint.scheduler.chunks import Chunks
from forkpoint.scheduler.plan import PlanDraft, Span, StepPlan
from forkpoint.scheduler.roster import Roster
from forkpoint.scheduler.sequence import Sequence


class Planner:
    """Plans steps. Holds no state of its own."""

    def __init__(self, roster: Roster, cache: PrefixCache, *, chunks: Chunks, arrivals: Arrivals) -> None:
        self._roster = roster
        self._cache = cache
        self._chunks = chunks
        self._arrivals = arrivals

    def plan(self) -> StepPlan:
        """As Scheduler.plan()."""
        running = self._roster.running
        while True:
            draft = PlanDraft()
            self._plan_decodes(draft)
            self._plan_prefills(draft)
            self._arrivals.plan(draft)
            if not draft.is_empty or not running:
                if draft.is_empty:
                    self._arrivals.wait_for_grammar()
                return draft.plan()
            # Prefills hold all pages and none can go on: the newest gives way.
            self._give_way(running[-1])

    def _plan_decodes(self, draft: PlanDraft) -> None:
        for sequence in list(self._roster.running):
            lease, start = sequence.lease, sequence.num_computed
            if lease is None or not sequence.is_decoding:
                continue  # it had to go for an older one just now, or is a prefill
            try:
                self._cache.extend(lease, start + 1)
            except OutOfPages:
                if not self._reserve_by_force(sequence):
                    continue
            draft.add_decode(Span(sequence, start, start + 1, is_decode=True))

    def _reserve_by_force(self, sequence: Sequence) -> bool:
        """Reserve one row, retracting newer sequences for it; False if `sequence` itself had to go."""
        while True:
            self._give_way(self._roster.running[-1])
            if sequence.lease is None:
                return False
            with contextlib.suppress(OutOfPages):
                self._cache.extend(sequence.lease, sequence.num_computed + 1)
                return True

    def _give_way(self, sequence: Sequence) -> None:
        """Retract the newest sequence; one that fills the pools alone ends with `length`."""
        num_running = len(self._roster.running)
        if num_running == 1 and sequence.is_decoding:
            self._roster.end(sequence, "length")
            return
        assert num_running > 1, "a sequence that fits the pools alone cannot go on"
        self._roster.retract(sequence)

    def _plan_prefills(self, draft: PlanDraft) -> None:
        for sequence in self._roster.running:
            if not sequence.is_decoding:
                self._chunks.jump_ahead(sequence)
                self._chunks.plan(sequence, draft)
