"""What two looks at /debug/steps say about the time between them: rates, hit rates, how long steps took."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Look = Mapping[str, Any]
"""An answer of /debug/steps."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """Prompt tokens by where they came from."""

    cached: int
    rebuilt: int
    computed: int

    @property
    def prompt(self) -> int:
        return self.cached + self.rebuilt + self.computed

    @property
    def share(self) -> float | None:
        """What was not computed, of 1; None before any prompt."""
        return (self.cached + self.rebuilt) / self.prompt if self.prompt else None


@dataclass(frozen=True, slots=True)
class LiveFigures:
    """recent: of the time between the looks; overall: since the server started. Rates are per second.

    step_ms: median of the steps in between; None if there was none. rows: of prompts, rebuilds and answers.
    """

    prompt_rate: float
    answer_rate: float
    recent: Reuse
    overall: Reuse
    step_ms: float | None
    longest_step_ms: float | None
    rows: tuple[int, int, int]


def live_figures(before: Look, after: Look) -> LiveFigures:
    """before, after: two looks at one server, the second asked for the steps after the first."""
    elapsed_s = max(after["now"] - before["now"], 1e-6)
    new: Sequence[Mapping[str, Any]] = after["steps"]
    recent = _reuse(after["totals"], before["totals"])
    answered = after["totals"]["generation_tokens"] - before["totals"]["generation_tokens"]
    times_ms = [1e3 * step["seconds"] for step in new]
    return LiveFigures(
        prompt_rate=recent.prompt / elapsed_s,
        answer_rate=answered / elapsed_s,
        recent=recent,
        overall=_reuse(after["totals"], None),
        step_ms=statistics.median(times_ms) if times_ms else None,
        longest_step_ms=max(times_ms, default=None),
        rows=(
            sum(step["prefill_rows"] for step in new),
            sum(step["rebuild_rows"] for step in new),
            sum(step["decode_rows"] for step in new),
        ),
    )


def _reuse(totals: Mapping[str, int], before: Mapping[str, int] | None) -> Reuse:
    cached, rebuilt, computed = (
        totals[f"{name}_tokens"] - (before[f"{name}_tokens"] if before is not None else 0)
        for name in ("cached", "rebuilt", "computed")
    )
    return Reuse(cached, rebuilt, computed)
