"""The figures of a run, from its records alone. Names are those of `vllm bench serve`; times are in ms."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forkpoint.server.bench.record import RequestRecord

Figures = dict[str, float | int | None]

_SHOWN_ERRORS = 3


@dataclass(frozen=True, slots=True)
class Report:
    """figures: what `--json` has at its top. errors: messages and how often each came."""

    figures: Figures
    errors: tuple[tuple[str, int], ...]


def make_report(records: Sequence[RequestRecord], lags_s: Sequence[float] = ()) -> Report:
    """Warm-up requests count nowhere; failed ones in `failed` alone. A figure that nobody can know is None.

    token_hit_rate: of the prompts of which the server says how much came from its cache.
    client_lag_ms: how late the client's own loop was (99th percentile); it is part of every latency.
    """
    measured = [record for record in records if not record.is_warmup]
    done = [record for record in measured if not record.has_failed]
    begin_s = min((record.start_s for record in measured), default=0.0)
    duration_s = max((record.end_s for record in done), default=begin_s) - begin_s
    output_tokens = sum(record.answer.output_tokens for record in done)
    told = [record.answer for record in done if record.answer.prompt_tokens is not None]
    prompt_tokens = sum(answer.prompt_tokens or 0 for answer in told) if told else None
    hits = [answer for answer in told if answer.cached_tokens is not None]
    cached_tokens = sum(answer.cached_tokens or 0 for answer in hits) if hits else None
    asked = sum(answer.prompt_tokens or 0 for answer in hits)
    figures: Figures = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(measured) - len(done),
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
        "token_hit_rate": cached_tokens / asked if cached_tokens is not None and asked else None,
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": _rate(len(done), duration_s),
        "output_throughput": _rate(output_tokens, duration_s),
        "total_token_throughput": (
            None if prompt_tokens is None else _rate(prompt_tokens + output_tokens, duration_s)
        ),
    }
    latencies: Mapping[str, list[float]] = {
        "ttft": [each.answer.ttft_s for each in done if each.answer.ttft_s is not None],
        "tpot": [each.tpot_s for each in done if each.tpot_s is not None],
        "itl": [latency for each in done for latency in each.answer.itls_s],
        "e2el": [each.answer.last_s for each in done if each.answer.last_s is not None],
    }
    for name, values in latencies.items():
        figures |= _distribution(name, values)
    figures["max_lag_ms"] = 1e3 * max((record.lag_s for record in measured), default=0.0)
    figures["client_lag_ms"] = 1e3 * percentile(lags_s, 99) if lags_s else None
    errors = Counter(record.answer.error for record in measured if record.answer.error is not None)
    return Report(figures, tuple(errors.most_common(_SHOWN_ERRORS)))


def percentile(values: Sequence[float], percent: float) -> float:
    """With linear interpolation between the two nearest, as numpy's default; values must not be empty."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _distribution(name: str, values: Sequence[float]) -> Figures:
    if not values:
        return {f"{part}_{name}_ms": None for part in ("mean", "median", "std", "p90", "p99")}
    return {
        f"mean_{name}_ms": 1e3 * statistics.fmean(values),
        f"median_{name}_ms": 1e3 * statistics.median(values),
        f"std_{name}_ms": 1e3 * statistics.pstdev(values),
        f"p90_{name}_ms": 1e3 * percentile(values, 90),
        f"p99_{name}_ms": 1e3 * percentile(values, 99),
    }


def _rate(count: int, duration_s: float) -> float | None:
    return count / duration_s if duration_s > 0 else None
