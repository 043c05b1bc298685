"""SWA pages of the tree that nobody holds any more, but that are still live until somebody needs the memory.

They count as free, are taken before any kept window, oldest first, and may complete a window until then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from forkpoint.cache.tree import Node


@dataclass(slots=True)
class ScrapRun:
    """Pages start..end on the path to `node` that were let go together. Some may be held again by now.

    Mutable: it grows at its end while a sequence lets go page after page, and is used up from its start.
    The node may have left the tree since; what lies above it on the path has not.
    """

    node: Node
    start: int
    end: int


class Scraps:
    """Runs in the order in which they were let go. Knows where to look, not what is still a scrap there."""

    def __init__(self) -> None:
        self._runs: deque[ScrapRun] = deque()
        self._compact_at = 1024

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, node: Node, start: int, end: int) -> None:
        """Remember a run; one that continues the newest is joined with it."""
        if self._runs:
            last = self._runs[-1]
            if last.node is node and last.end == start:
                last.end = end
                return
        self._runs.append(ScrapRun(node, start, end))

    @property
    def oldest(self) -> ScrapRun:
        """The run that was let go first. There must be one."""
        return self._runs[0]

    def use_up(self, end: int) -> None:
        """Forget of the oldest run what lies below page `end`."""
        run = self._runs[0]
        if end >= run.end:
            self._runs.popleft()
        else:
            run.start = end

    def compact(self, has_scraps: Callable[[ScrapRun], bool]) -> None:
        """Forget runs that hold no scrap any more, once there are many. Amortised O(1) per run added."""
        if len(self._runs) >= self._compact_at:
            self._runs = deque(run for run in self._runs if has_scraps(run))
            self._compact_at = max(1024, 2 * len(self._runs))

    def runs(self) -> list[ScrapRun]:
        """A copy, oldest first; for audits."""
        return list(self._runs)
