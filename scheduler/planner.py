"""Which rows run in the next step. Pages are reserved as rows are planned, so a plan can always run.

A step's order: decode rows of running sequences, oldest first; chunks of prefills in progress; then waiting
sequences, first come first served.
"""

from __future__ import annotations

from forkpoint.cache import OutOfPages, PrefixCache
from forkpoint.scheduler.arrivals import Arrivals
from forkpoint.scheduler.chunks import Chunks
from forkpoint.scheduler.plan import Span, StepPlan
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
            spans: list[Span] = []
            self._plan_decodes(spans)
            self._plan_prefills(spans)
            self._arrivals.plan(spans)
            if spans or not running:
                if not spans:
                    self._arrivals.wait_for_grammar()
                return StepPlan(tuple(spans))
            # Prefills hold all pages and none can go on: the newest gives way.
            self._give_way(running[-1])

    def _plan_decodes(self, spans: list[Span]) -> None:
        for sequence in list(self._roster.running):
            if sequence.is_decoding and sequence.lease is not None and self._reserve_decode_row(sequence):
                start = sequence.num_computed
                spans.append(Span(sequence, start, start + 1, is_decode=True))

    def _reserve_decode_row(self, sequence: Sequence) -> bool:
        """Reserve one row, retracting newer sequences for it; False if `sequence` itself had to go."""
        while sequence.lease is not None:
            try:
                self._cache.extend(sequence.lease, sequence.num_computed + 1)
                return True
            except OutOfPages:
                self._give_way(self._roster.running[-1])
        return False

    def _give_way(self, sequence: Sequence) -> None:
        """Retract the newest sequence; one that fills the pools alone ends with `length`."""
        num_running = len(self._roster.running)
        if num_running == 1 and sequence.is_decoding:
            self._roster.end(sequence, "length")
            return
        assert num_running > 1, "a sequence that fits the pools alone cannot go on"
        self._roster.retract(sequence)

    def _plan_prefills(self, spans: list[Span]) -> None:
        for sequence in self._roster.running:
            if not sequence.is_decoding:
                self._chunks.jump_ahead(sequence)
                self._chunks.plan(sequence, spans)
