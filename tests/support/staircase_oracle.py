"""Which rows of a span are right in which layers, found by following dependences layer by layer.

Knows nothing of the rebuild's formula: it is told which rows each layer runs and which stored SWA state is
right in how many layers, and derives what comes out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def run_span(
    pattern: str,
    window: int | None,
    first_rows: Sequence[int] | None,
    start: int,
    end: int,
    stored: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Run positions start..end through all layers.

    first_rows: a[0] .. a[n], layer l's KV on rows from a[l], its attention on rows from a[l+1]; None: all 0.
    stored: for each position before start that the tables list, the number of lowest layers in which its SWA
    state is right; the last entry is position start - 1.
    Returns for each row the number of lowest layers in which its KV is right, and whether its output is.
    """
    a = first_rows if first_rows is not None else [0] * (len(pattern) + 1)
    positions = np.arange(start, end)
    is_right = np.ones(end - start, dtype=bool)
    right_layers = np.zeros(end - start, dtype=np.int64)
    for layer, kind in enumerate(pattern):
        has_kv = is_right & (positions >= a[layer])
        right_layers[has_kv & (right_layers == layer)] = layer + 1
        is_right = has_kv & (positions >= a[layer + 1])
        if kind == "S":
            assert window is not None
            is_right &= _window_is_right(stored > layer, has_kv, start, window)
    return right_layers, is_right


def _window_is_right(
    stored: NDArray[np.bool_], rows: NDArray[np.bool_], start: int, window: int
) -> NDArray[np.bool_]:
    """For each row, whether all of (p - W, p] is right; positions below 0 do not exist."""
    missing = max(0, min(start, window - 1) - len(stored))
    known = np.concatenate([np.zeros(missing, dtype=bool), stored, rows])
    wrong_before = np.concatenate([[0], np.cumsum(~known)])
    ends = np.arange(len(known) - len(rows), len(known)) + 1
    begins = np.maximum(0, ends - window)
    return np.asarray(wrong_before[ends] == wrong_before[begins])
