"""In which order kept SWA windows are given up: small classes chosen by name."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Protocol

from forkpoint.cache.tree import Window


class WindowOrder(Protocol):
    """An order of kept windows by value. It decides, the SWA component executes."""

    def touch(self, window: Window) -> None:
        """The window was kept or used just now."""
        ...

    def forget(self, window: Window) -> None: ...

    def victims(self) -> Iterator[Window]:
        """All windows, least valued first. The caller may drop what it is given while it iterates."""
        ...


class LruWindows:
    """Least recently used first."""

    def __init__(self) -> None:
        self._windows: OrderedDict[Window, None] = OrderedDict()

    def touch(self, window: Window) -> None:
        self._windows[window] = None
        self._windows.move_to_end(window)

    def forget(self, window: Window) -> None:
        del self._windows[window]

    def victims(self) -> Iterator[Window]:
        num_passed_over = 0
        while batch := list(islice(self._windows, num_passed_over, num_passed_over + 16)):
            for window in batch:
                yield window
                num_passed_over += window in self._windows


EVICTION_POLICIES: dict[str, Callable[[], WindowOrder]] = {"lru": LruWindows}
