"""The latest steps of the engine, kept in the API process for whoever looks."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from forkpoint.scheduler.client import EngineClient
from forkpoint.scheduler.messages import StepTokens

KEPT_STEPS = 600


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """number: counts from 1 for the life of the server. ended_s: Unix time. Rows as in StepTokens."""

    number: int
    ended_s: float
    seconds: float
    prefill_rows: int
    rebuild_rows: int
    decode_rows: int
    running: int
    waiting: int


class StepLog:
    """Mutable: forgets the oldest step when KEPT_STEPS are there. A step costs it one small object."""

    def __init__(self, engine: EngineClient, *, kept: int = KEPT_STEPS) -> None:
        self._steps: deque[LoggedStep] = deque(maxlen=kept)
        self._number = 0
        engine.on_step(self.observe_step)

    @property
    def last(self) -> int:
        """The number of the latest step; 0 before the first."""
        return self._number

    def observe_step(self, step: StepTokens) -> None:
        if step.num_prefill_rows + step.num_decode_rows == 0:
            return  # it only reported an abort
        self._number += 1
        self._steps.append(
            LoggedStep(
                number=self._number,
                ended_s=round(time.time(), 4),
                seconds=round(step.step_s, 6),
                prefill_rows=step.num_prefill_rows - step.num_rebuild_rows,
                rebuild_rows=step.num_rebuild_rows,
                decode_rows=step.num_decode_rows,
                running=step.stats.running,
                waiting=step.stats.waiting,
            )
        )

    def after(self, number: int) -> list[LoggedStep]:
        """The steps that came after this one, oldest first, as far as they are still kept."""
        count = min(self._number - number, len(self._steps))
        if count <= 0:
            return []
        newest = [step for step, _ in zip(reversed(self._steps), range(count), strict=False)]
        return newest[::-1]
