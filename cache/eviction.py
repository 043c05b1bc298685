"""In which order kept SWA windows are given up: small classes chosen by name."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable
from itertools import islice

from forkpoint.cache.eviction_cost import CostWindows
from forkpoint.cache.tree import Window
from forkpoint.cache.window_order import Appraisal, WindowOrder


class LruWindows:
    """Least recently used first; what nobody holds is freed at once."""

    keeps_scraps = False

    def __init__(self) -> None:
        self._windows: OrderedDict[Window, None] = OrderedDict()

    def bind(self, appraise: Callable[[Window], Appraisal], clock: Callable[[], int]) -> None:
        """Recency is all that this order asks."""

    def keep(self, window: Window) -> None:
        self._windows[window] = None
        self._windows.move_to_end(window)

    def hit(self, window: Window) -> None:
        window.hits += 1
        self.keep(window)

    def forget(self, window: Window, *, is_evicted: bool) -> None:
        del self._windows[window]

    def windows(self) -> Iterable[Window]:
        return self._windows

    def victims(self) -> Generator[Window, None, None]:
        num_passed_over = 0
        while batch := list(islice(self._windows, num_passed_over, num_passed_over + 16)):
            for window in batch:
                yield window
                num_passed_over += window in self._windows


# Each makes an order for a SWA pool of so many pages.
EVICTION_POLICIES: dict[str, Callable[[int], WindowOrder]] = {
    "cost": CostWindows,
    "lru": lambda num_pages: LruWindows(),
}
