"""The figures of `forkpoint bench` from given records: sums, rates, percentiles, and what counts at all."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkpoint.server.bench.record import Answer, Chunk, RequestRecord, inter_token_latencies
from forkpoint.server.bench.report import make_report, percentile
from forkpoint.server.bench.workload import arrival_times


def record(start_s: float, answer: Answer, *, is_warmup: bool = False, lag_s: float = 0.0) -> RequestRecord:
    return RequestRecord(
        conversation=0, turn=0, prefix=None, is_warmup=is_warmup,
        start_s=start_s, lag_s=lag_s, wanted_tokens=3, answer=answer,
    )  # fmt: skip


def answer(
    ttft_s: float, last_s: float, tokens: int, *, prompt: int | None = 10, cached: int | None = 4
) -> Answer:
    itls = tuple([(last_s - ttft_s) / (tokens - 1)] * (tokens - 1)) if tokens > 1 else ()
    return Answer(
        ttft_s=ttft_s, last_s=last_s, itls_s=itls, output_tokens=tokens,
        prompt_tokens=prompt, cached_tokens=cached,
    )  # fmt: skip


def test_every_figure_of_three_requests() -> None:
    records = [
        record(0.0, answer(0.5, 1.5, 3)),
        record(1.0, answer(0.1, 0.5, 5, cached=6), lag_s=0.02),
        record(1.5, answer(0.3, 2.5, 1, cached=None)),
    ]
    figures = make_report(records, [0.001] * 99 + [0.1]).figures
    assert figures["duration"] == 4.0  # from the first sending to the last end
    assert (figures["completed"], figures["failed"]) == (3, 0)
    assert (figures["total_output_tokens"], figures["prompt_tokens"], figures["cached_tokens"]) == (9, 30, 10)
    assert figures["token_hit_rate"] == 0.5  # of the two prompts that the server tells of
    assert figures["request_throughput"] == 0.75
    assert figures["output_throughput"] == 2.25
    assert figures["total_token_throughput"] == 39 / 4
    assert figures["mean_ttft_ms"] == pytest.approx(300)
    assert figures["median_ttft_ms"] == pytest.approx(300)
    assert figures["p99_ttft_ms"] == pytest.approx(496)
    assert figures["std_ttft_ms"] == pytest.approx(1e3 * math.sqrt(0.08 / 3))
    assert figures["mean_tpot_ms"] == pytest.approx((500 + 100) / 2)  # one token has none
    assert figures["mean_itl_ms"] == pytest.approx((2 * 500 + 4 * 100) / 6)
    assert figures["mean_e2el_ms"] == pytest.approx(1500)
    assert figures["max_lag_ms"] == pytest.approx(20)
    assert figures["client_lag_ms"] == pytest.approx(1.99, abs=0.01)


def test_failed_and_warm_up_requests_are_in_no_latency() -> None:
    slow = Answer(ttft_s=99.0, last_s=100.0, output_tokens=2, error="it broke off")
    records = [
        record(-5.0, answer(9.0, 9.5, 3), is_warmup=True),
        record(0.0, answer(0.5, 1.0, 3)),
        record(0.1, slow),
        record(0.2, slow),
        record(0.3, Answer(error="status 500")),
    ]
    report = make_report(records)
    assert (report.figures["completed"], report.figures["failed"]) == (1, 3)
    assert report.figures["p99_ttft_ms"] == pytest.approx(500)
    assert report.figures["duration"] == 1.0
    assert report.errors == (("it broke off", 2), ("status 500", 1))


def test_what_nobody_knows_is_none_and_never_zero() -> None:
    figures = make_report([record(0.0, answer(0.5, 1.0, 3, prompt=None, cached=None))]).figures
    for name in (
        "prompt_tokens",
        "cached_tokens",
        "token_hit_rate",
        "total_token_throughput",
        "client_lag_ms",
    ):
        assert figures[name] is None, name
    empty = make_report([]).figures
    assert empty["mean_ttft_ms"] is None and empty["request_throughput"] is None
    assert empty["completed"] == 0


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    import numpy as np

    assert percentile(values, percent) == pytest.approx(
        float(np.percentile(values, percent)), rel=1e-9, abs=1e-9
    )


@given(st.lists(st.tuples(st.floats(0.001, 2), st.integers(1, 4)), min_size=1, max_size=20), st.booleans())
def test_latencies_of_tokens_add_up_to_the_time_between_the_chunks(
    parts: list[tuple[float, int]], is_told: bool
) -> None:
    at_s, count, chunks = 0.0, 0, []
    for gap_s, tokens in parts:
        at_s, count = at_s + gap_s, count + tokens
        chunks.append(Chunk(at_s, count if is_told else None))
    latencies = inter_token_latencies(chunks, count)
    assert sum(latencies) == pytest.approx(chunks[-1].at_s - chunks[0].at_s)
    if is_told:
        assert len(latencies) == count - parts[0][1]


def test_a_chunk_of_several_tokens_counts_as_many() -> None:
    chunks = [Chunk(1.0, 1), Chunk(1.3, 4), Chunk(1.4, 5)]
    assert inter_token_latencies(chunks, 5) == pytest.approx((0.1, 0.1, 0.1, 0.1))
    untold = [Chunk(1.0, None), Chunk(1.4, None)]
    assert inter_token_latencies(untold, 4) == pytest.approx((0.2, 0.2))


def test_arrivals_have_the_rate_and_the_burstiness_and_the_same_seed_the_same() -> None:
    count, rate = 4000, 8.0
    poisson = arrival_times(rate, 1.0, count, seed=1)
    assert poisson == arrival_times(rate, 1.0, count, seed=1) != arrival_times(rate, 1.0, count, seed=2)
    assert poisson[0] == 0.0 and list(poisson) == sorted(poisson)
    for burstiness in (0.25, 1.0, 4.0):
        times = arrival_times(rate, burstiness, count, seed=3)
        gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
        mean = sum(gaps) / len(gaps)
        variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
        assert mean == pytest.approx(1 / rate, rel=0.15)
        assert variance / mean**2 == pytest.approx(1 / burstiness, rel=0.3)  # of a gamma distribution
    assert set(arrival_times(float("inf"), 1.0, 5, seed=1)) == {0.0}
