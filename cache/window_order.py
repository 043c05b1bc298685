"""What decides in which order kept SWA windows are given up."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Protocol

from forkpoint.cache.tree import Window


@dataclass(frozen=True, slots=True)
class Appraisal:
    """num_freed: pages that only this window holds. cost: row-layers to rebuild it if it is wanted again."""

    num_freed: int
    cost: int


class WindowOrder(Protocol):
    """An order of kept windows by value. It decides, the SWA component executes.

    keeps_scraps: whether pages that nobody holds stay live until memory is short.
    """

    @property
    def keeps_scraps(self) -> bool: ...

    def bind(self, appraise: Callable[[Window], Appraisal], clock: Callable[[], int]) -> None:
        """What the order may ask: the worth of a window now, and how many SWA pages were allocated so far."""
        ...

    def keep(self, window: Window) -> None:
        """The window was made or refreshed just now."""
        ...

    def hit(self, window: Window) -> None:
        """A request resumed from the window just now."""
        ...

    def forget(self, window: Window, *, is_evicted: bool) -> None: ...

    def windows(self) -> Iterable[Window]:
        """All windows, in no promised order."""
        ...

    def victims(self) -> Generator[Window, None, None]:
        """All windows, least valued first. The caller may drop what it is given while it iterates."""
        ...
