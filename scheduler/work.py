"""What rows cost when some of them run in few layers: the budget's unit, and what a hit still asks for."""

from __future__ import annotations

from forkpoint.cache import Match
from forkpoint.configs.staircase import Staircase
from forkpoint.scheduler.plan import Span


class WorkMeter:
    """Measures spans and hits of one model. staircase: None when gaps run in all layers."""

    def __init__(self, staircase: Staircase | None) -> None:
        self._staircase = staircase

    def rows(self, span: Span) -> int:
        """What a span takes of a step's budget: rows, of rebuilds by the share of layers they run in."""
        stairs = self._staircase
        if stairs is None or span.start >= span.lease.full_hit:
            return span.num_rows
        row_layers = stairs.row_layers(span.lease.full_hit, span.lease.resume, span.start, span.end)
        return -(-row_layers // stairs.num_layers)

    def row_layers_below(self, match: Match) -> int:
        """Row-layers to run below the full hit of a sequence that borrows `match`."""
        stairs = self._staircase
        if stairs is None:
            return match.full_len - match.resume_len
        first = stairs.start(match.full_len, match.resume_len)
        return stairs.row_layers(match.full_len, match.resume_len, first, match.full_len)

    def row_layers_of(self, num_rows: int) -> int:
        """Row-layers of ordinary rows, in the same unit."""
        return num_rows * (1 if self._staircase is None else self._staircase.num_layers)
