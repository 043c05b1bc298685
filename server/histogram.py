"""A Prometheus histogram for what is observed with every token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class LoopHistogram(Collector):
    """The client library's Histogram without locks: 0.4 us for an observation, not 3 (November 2026).

    Mutable; to be used on one thread, the event loop's, and collected there.
    """

    def __init__(
        self, name: str, documentation: str, *, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = [*buckets, float("inf")]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, *, times: int = 1) -> None:
        """Count `value`, as if it had been observed so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._documentation)
        buckets, total = [], 0
        for bound, count in zip(self._bounds, self._counts, strict=True):
            total += count
            buckets.append((str(floatToGoString(bound)), float(total)))  # type: ignore[no-untyped-call]
        family.add_metric([], buckets, self._sum)
        return [family]
