"""Tells whether the time that a piece of work takes grows like its size or faster."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

FACTOR = 16
TRIES = 3


def grows_linearly(run: Callable[[int], object], size: int) -> bool:
    """Whether run(16 * size) takes less than 80 times as long as run(size).

    What is linear takes 16 to 30 times as long, for more memory means more misses of the caches; what is
    quadratic 256 times. The collector of cycles, whose work grows faster, is off; of each the best of three.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return _seconds(run, FACTOR * size) < 80 * _seconds(run, size)
    finally:
        if was_enabled:
            gc.enable()


def _seconds(run: Callable[[int], object], size: int) -> float:
    seconds = []
    for _ in range(TRIES):
        began = time.process_time()
        run(size)
        seconds.append(time.process_time() - began)
    return max(min(seconds), 0.001)
