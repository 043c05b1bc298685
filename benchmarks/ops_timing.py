"""Thread CPU time of calls: in loops, or one by one with preparation outside the clock."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from statistics import median
from typing import TypeVar

import numpy as np

NUM_REPETITIONS = 7
Prepared = TypeVar("Prepared")


def loop_us(call: Callable[[], object], *, num_calls: int) -> float:
    """Microseconds of one call: median over repetitions of the mean of a loop."""
    found = []
    for _ in range(NUM_REPETITIONS):
        start = time.thread_time_ns()
        for _ in range(num_calls):
            call()
        found.append((time.thread_time_ns() - start) / num_calls / 1000)
    return median(found)


def each_us(
    prepare: Callable[[], Prepared],
    call: Callable[[Prepared], object],
    *,
    num_calls: int = 12 * NUM_REPETITIONS,
) -> float:
    """Microseconds of one call, median, reading the clock included; `prepare` makes what it is given."""
    found = []
    for _ in range(num_calls):
        prepared = prepare()
        start = time.thread_time_ns()
        call(prepared)
        found.append((time.thread_time_ns() - start) / 1000)
    return median(found)


def clock_us() -> float:
    """What reading the clock once costs."""
    return loop_us(time.thread_time_ns, num_calls=1000)


def calibration_us() -> float:
    """A fixed piece of work of the cache's kind: small numpy calls and moves in an ordered dictionary.

    Tells how fast a machine is at the moment; to be compared before two result files are.
    """
    left, right = np.arange(4096, dtype=np.int32), np.arange(4096, dtype=np.int32)
    order = OrderedDict.fromkeys(range(64))

    def work() -> None:
        for _ in range(8):
            int((left != right).argmax())
            np.count_nonzero(left[:16] == 0)
        for key in range(64):
            order.move_to_end(key)

    return loop_us(work, num_calls=300)
