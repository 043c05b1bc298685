"""What a person sees while a server starts: bars on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

# Often enough to see that something happens, seldom enough for a log file.
LINE_INTERVAL_S = 5.0


class StartupProgress(Protocol):
    """Shows the stages of a start, one after the other."""

    def show(self, what: str, done: int, total: int) -> None:
        """done of total units of the stage `what`; a new name begins a new stage. Cheap; never raises."""
        ...

    def note(self, text: str) -> None:
        """Print lines without disturbing the bars."""
        ...

    def close(self) -> None:
        """Take the bars away. Idempotent; show() may still come and does nothing."""
        ...


def startup_progress(stream: TextIO | None = None) -> StartupProgress:
    """Bars if `stream` (standard error by default) is a terminal, lines otherwise."""
    stream = stream or sys.stderr
    return Bars(stream) if stream.isatty() else Lines(stream)


class Lines:
    """A line when a stage begins, ends, or goes on for LINE_INTERVAL_S. Mutable: remembers the last one."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._stage = ""
        self._last_s = 0.0
        self._is_closed = False

    def show(self, what: str, done: int, total: int) -> None:
        now_s = self._clock()
        is_news = what != self._stage or done >= total or now_s - self._last_s >= LINE_INTERVAL_S
        if is_news and not self._is_closed:
            self._stage, self._last_s = what, now_s
            self.note(f"forkpoint: {what}: {_percent(done, total)} %")

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        self._is_closed = True


class Bars:
    """One bar for each stage, under each other. Mutable: owns the live display of the terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._is_closed = False
        self._progress.start()

    def show(self, what: str, done: int, total: int) -> None:
        if self._is_closed:
            return
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._tasks[what], completed=done, total=total)

    def note(self, text: str) -> None:
        self._console.print(text, markup=False)

    def close(self) -> None:
        self._is_closed = True
        self._progress.stop()


def _percent(done: int, total: int) -> int:
    return 100 * done // total if total > 0 else 100
