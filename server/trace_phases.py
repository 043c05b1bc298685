"""The phases of a choice as intervals, from the times that its timer kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forkpoint.server.request_metrics import ChoiceTimer


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a choice's life, in seconds of time.monotonic()."""

    name: Literal["queue", "prefill", "decode"]
    start_s: float
    end_s: float


def phases_of(timer: ChoiceTimer) -> tuple[Phase, ...]:
    """What a choice that ended went through, in order and without gaps.

        submitted        admitted        first token        finished
            |---- queue ----|--- prefill ---|----- decode -----|

    A choice that ended earlier has fewer of them. A rebuild has no interval of its own: its rows run in the
    same steps as rows of the prefill.
    """
    assert timer.finished_s is not None, "phases are those of a choice that ended"
    end_s = timer.finished_s
    if timer.queue_time_s is None:
        return (Phase("queue", timer.submitted_s, end_s),)
    first_token_s = end_s if timer.first_token_s is None else timer.first_token_s
    # The engine measured the wait by its own clock reading, the other times are those of this process.
    admitted_s = min(timer.submitted_s + timer.queue_time_s, first_token_s)
    phases = (
        Phase("queue", timer.submitted_s, admitted_s),
        Phase("prefill", admitted_s, first_token_s),
    )
    if timer.first_token_s is None:
        return phases
    return (*phases, Phase("decode", first_token_s, end_s))
