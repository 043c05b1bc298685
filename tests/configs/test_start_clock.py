"""Stages of a start: none is lost, none counts twice, and the process' own age is what the system says."""

from __future__ import annotations

import time

import psutil
from hypothesis import given
from hypothesis import strategies as st

from forkpoint.configs.start_clock import StartClock, process_age_s


class Clock:
    """Time that passes when a test says so."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@given(
    age_s=st.integers(0, 50),
    begun=st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["a", "b", "c"])), max_size=12),
)
def test_stages_add_up_to_the_whole_start(age_s: int, begun: list[tuple[int, str]]) -> None:
    clock = Clock()
    start = StartClock("first", age_s=float(age_s), clock=clock)
    for seconds, stage in begun:
        clock.now_s += seconds
        start.begin(stage)
    clock.now_s += 3
    start.begin("ready")
    names = [name for name, _ in start.stages]
    assert sum(seconds for _, seconds in start.stages) == age_s + clock.now_s - 100.0
    assert names == list(dict.fromkeys(["first", *(stage for _, stage in begun)]))


def test_the_stage_that_runs_goes_on_when_it_is_named_again() -> None:
    clock = Clock()
    start = StartClock("weights", age_s=0.0, clock=clock)
    for _ in range(3):
        clock.now_s += 1
        start.begin("weights")
    assert not start.stages
    start.begin("ready")
    assert start.stages == (("weights", 3.0),)


def test_the_first_stage_began_with_the_process() -> None:
    started_s = psutil.Process().create_time()  # to the second on some systems
    assert abs(time.time() - process_age_s() - started_s) < 1.5
    start = StartClock("command line")
    start.begin("ready")
    ((_, seconds),) = start.stages
    assert abs(seconds - process_age_s()) < 1.0
