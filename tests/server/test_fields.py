"""Reading numbers of requests: every bound holds for what is no number too, whatever parsed the JSON."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkpoint.configs.errors import RequestError
from forkpoint.server.fields import Fields

FINITE = st.floats(allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("low", "high"), [(0.0, 2.0), (-2.0, 2.0), (-math.inf, math.inf)])
def test_number_that_is_not_finite_is_refused_whatever_the_range(
    value: float, low: float, high: float
) -> None:
    """Every comparison with NaN is false: a check for too small and too large would let it pass."""
    fields = Fields({"temperature": value}, "sampling.")
    with pytest.raises(RequestError) as caught:
        fields.number("temperature", default=1.0, low=low, high=high)
    assert caught.value.param == "sampling.temperature"


@given(FINITE, FINITE, FINITE)
def test_number_is_taken_if_and_only_if_it_lies_in_its_range(value: float, one: float, other: float) -> None:
    low, high = sorted((one, other))
    fields = Fields({"x": value})
    if low <= value <= high:
        assert fields.number("x", default=0.0, low=low, high=high) == value
        return
    with pytest.raises(RequestError, match="it must be in"):
        fields.number("x", default=0.0, low=low, high=high)


def test_a_bound_of_64_bits_is_left_out_of_the_message() -> None:
    with pytest.raises(RequestError, match=r"^n is 0; it must be at least 1$"):
        Fields({"n": 0}).integer("n", low=1, high=2**63 - 1)
    with pytest.raises(RequestError, match=r"^n is 0; it must be in \[1, 128\]$"):
        Fields({"n": 0}).integer("n", low=1, high=128)
