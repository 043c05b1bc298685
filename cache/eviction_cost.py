"""Gives up the kept window whose loss is expected to cost least: reuse x rebuild cost / pages freed, aged."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass

from forkpoint.cache.tree import Window, WindowClass
from forkpoint.cache.window_order import Appraisal

# Expected further hits of a window of a class that had 0, 1, or more hits so far, before anything is learned.
# The first hit of a tail means that its conversation has moved on, not that others will fork there.
PRIOR_REUSE: dict[WindowClass, tuple[float, float, float]] = {
    "system_anchor": (0.8, 0.9, 0.95),
    "message_anchor": (0.3, 0.5, 0.8),
    "prompt_tail": (0.5, 0.1, 0.6),
    "finish_tail": (0.3, 0.1, 0.6),
    "branch": (0.4, 0.7, 0.9),
}
# How many observed windows a prior weighs as much as.
PRIOR_WEIGHT = 4.0
# A window's value halves each time that so many times the pool was allocated anew since its last use. Chats
# in tight pools at W 512 take 1.57, 1.46 and 1.48 times the ideal's work at 1.75, 2.5 and 3 pools.
HALF_LIFE_POOLS = 2.5


@dataclass(slots=True)
class _Record:
    """How windows of one class and hit count fared. Mutable: it learns."""

    hit: float
    seen: float

    @property
    def reuse(self) -> float:
        return self.hit / self.seen


class ReuseEstimator:
    """Learns how likely a window is to be hit again, per class and by its hits so far (0, 1, 2 or more)."""

    def __init__(self) -> None:
        self._records = {
            (window_class, hits): _Record(prior * PRIOR_WEIGHT, PRIOR_WEIGHT)
            for window_class, priors in PRIOR_REUSE.items()
            for hits, prior in enumerate(priors)
        }

    def expected_reuse(self, window: Window) -> float:
        """Between 0 and 1: the share of such windows that were hit again before they were evicted."""
        return self._record(window).reuse

    def note_hit(self, window: Window) -> None:
        """To be called before window.hits is raised."""
        record = self._record(window)
        record.hit += 1
        record.seen += 1

    def note_eviction(self, window: Window) -> None:
        self._record(window).seen += 1

    def _record(self, window: Window) -> _Record:
        return self._records[window.window_class, min(window.hits, 2)]


class CostWindows:
    """Least expected loss per page first.

    Ageing halves all values alike, so log2(value) + last_use / half_life orders windows for good until their
    worth itself changes. Keys in the heap may be out of date: the least is appraised anew before it is given.
    """

    keeps_scraps = True

    def __init__(self, num_pages: int) -> None:
        """num_pages: capacity of the SWA pool."""
        self._half_life = HALF_LIFE_POOLS * num_pages
        self._estimator = ReuseEstimator()
        # Each window has one entry in the heap that counts, the one with this ticket.
        self._windows: dict[Window, int] = {}
        self._heap: list[tuple[float, int, Window]] = []
        self._ticket = itertools.count()
        self._appraise: Callable[[Window], Appraisal] | None = None
        self._clock: Callable[[], int] | None = None

    def bind(self, appraise: Callable[[Window], Appraisal], clock: Callable[[], int]) -> None:
        self._appraise, self._clock = appraise, clock

    def keep(self, window: Window) -> None:
        self._touch(window)

    def hit(self, window: Window) -> None:
        self._estimator.note_hit(window)
        window.hits += 1
        self._touch(window)

    def _touch(self, window: Window) -> None:
        assert self._clock is not None
        window.last_use = self._clock()
        # At once, not when it comes up: an eviction is somebody's decode step, and must not pay for many.
        self._push(window, self._key(window))

    def forget(self, window: Window, *, is_evicted: bool) -> None:
        if is_evicted:
            self._estimator.note_eviction(window)
        del self._windows[window]

    def windows(self) -> Iterable[Window]:
        return self._windows

    def victims(self) -> Generator[Window, None, None]:
        shown: list[tuple[float, Window]] = []
        try:
            while self._heap:
                window = self._pop()
                if window is None:
                    continue
                now = self._key(window)
                if self._heap and now > self._heap[0][0]:
                    self._push(window, now)
                    continue
                shown.append((now, window))
                yield window
        finally:
            for key, window in shown:
                if window in self._windows:
                    self._push(window, key)

    def _push(self, window: Window, key: float) -> None:
        ticket = self._windows[window] = next(self._ticket)
        heapq.heappush(self._heap, (key, ticket, window))
        if len(self._heap) > 2 * len(self._windows) + 64:
            self._compact()

    def _pop(self) -> Window | None:
        """The window with the least key; None if that was an entry which counts no more."""
        _, ticket, window = heapq.heappop(self._heap)
        return window if self._windows.get(window) == ticket else None

    def _compact(self) -> None:
        """Forget entries that count no more: each hit leaves one. Amortised O(1) per push."""
        self._heap = [entry for entry in self._heap if self._windows.get(entry[2]) == entry[1]]
        heapq.heapify(self._heap)

    def _key(self, window: Window) -> float:
        assert self._appraise is not None
        worth = self._appraise(window)
        value = self._estimator.expected_reuse(window) * worth.cost / max(1, worth.num_freed)
        return math.log2(max(value, 1e-9)) + window.last_use / self._half_life
