"""Where the time of a start goes: stages that follow each other in one process, from its very beginning."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

Stages = tuple[tuple[str, float], ...]
"""Names of stages with their seconds, in order."""


class StartClock:
    """Tells how long each stage of a start took. Mutable: knows the stage that runs.

    The first stage began with the process, before anything could be measured.
    """

    def __init__(
        self, first: str, *, age_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """age_s: how long the first stage has been running already; None: since the process began."""
        self._clock = clock
        self._running = first
        self._began_s = clock() - (process_age_s() if age_s is None else age_s)
        self._ended: dict[str, float] = {}

    def begin(self, stage: str) -> None:
        """The stage that runs has ended, `stage` begins; nothing changes if it is the same."""
        if stage == self._running:
            return
        now_s = self._clock()
        self._ended[self._running] = self._ended.get(self._running, 0.0) + now_s - self._began_s
        self._running, self._began_s = stage, now_s

    @property
    def stages(self) -> Stages:
        """Those that have ended, in the order of their beginning; one that came again counts once."""
        return tuple(self._ended.items())


def process_age_s() -> float:
    """Seconds since this process began, to 0.01 s; what it was before an exec counts too.

    0 where the system does not tell (it has no /proc).
    """
    try:
        # After the name, which may hold spaces and parentheses: fields 3 and on; 22 is the start since boot.
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        started_s = int(fields[22 - 3]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0
