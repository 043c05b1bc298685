"""Phases of a choice follow each other without gaps, whatever the times are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from forkpoint.server.request_metrics import ChoiceTimer, RequestMetrics
from forkpoint.server.trace_phases import Phase, phases_of

SECONDS = st.floats(0, 1e6)


def _timer(
    submitted_s: float, *, queue_time_s: float | None, first_token_s: float | None, finished_s: float
) -> ChoiceTimer:
    timer = RequestMetrics(CollectorRegistry()).request().choice()
    timer.submitted_s, timer.queue_time_s = submitted_s, queue_time_s
    timer.first_token_s, timer.finished_s = first_token_s, finished_s
    return timer


def test_phases_meet_at_admission_and_at_the_first_token() -> None:
    timer = _timer(10.0, queue_time_s=0.5, first_token_s=12.0, finished_s=15.0)
    assert phases_of(timer) == (
        Phase("queue", 10.0, 10.5),
        Phase("prefill", 10.5, 12.0),
        Phase("decode", 12.0, 15.0),
    )


def test_choice_that_was_never_admitted_only_queued() -> None:
    timer = _timer(10.0, queue_time_s=None, first_token_s=None, finished_s=15.0)
    assert phases_of(timer) == (Phase("queue", 10.0, 15.0),)


def test_choice_without_tokens_did_not_decode() -> None:
    timer = _timer(10.0, queue_time_s=0.5, first_token_s=None, finished_s=15.0)
    assert phases_of(timer) == (Phase("queue", 10.0, 10.5), Phase("prefill", 10.5, 15.0))


@given(times=st.lists(SECONDS, min_size=3, max_size=3), queue_time_s=SECONDS, has_token=st.booleans())
def test_phases_fill_the_life_of_a_choice(times: list[float], queue_time_s: float, has_token: bool) -> None:
    submitted_s, first_token_s, finished_s = sorted(times)
    timer = _timer(
        submitted_s,
        queue_time_s=queue_time_s,
        first_token_s=first_token_s if has_token else None,
        finished_s=finished_s,
    )
    phases = phases_of(timer)
    assert phases[0].start_s == submitted_s
    assert phases[-1].end_s == finished_s
    assert all(phase.start_s <= phase.end_s for phase in phases)
    assert all(before.end_s == after.start_s for before, after in zip(phases, phases[1:], strict=False))
