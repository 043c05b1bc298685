"""What the API process measures of each request: outcomes, and the times a client sees."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Histogram

from forkpoint.configs.errors import EngineDied, EngineDraining, EngineLoading, QueueFull, RequestError
from forkpoint.server.histogram import LoopHistogram

_TTFT_BUCKETS_S = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0
)  # fmt: skip
_ITL_BUCKETS_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0)
_LONG_BUCKETS_S = (0.1, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0, 1200.0)


class RequestMetrics:
    """Counters and histograms of one server, in its own registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "forkpoint_requests", "Choices that ended, by reason.", ["finish_reason"], registry=registry
        )
        self.rejected = Counter(
            "forkpoint_rejected_requests", "Requests refused before they ran.", ["reason"], registry=registry
        )
        self.time_to_first_token = Histogram(
            "forkpoint_time_to_first_token_seconds",
            "From the arrival of a request to the first token of a choice.",
            buckets=_TTFT_BUCKETS_S,
            registry=registry,
        )
        self.inter_token_latency = LoopHistogram(
            "forkpoint_inter_token_latency_seconds",
            "Between two tokens of a choice; tokens that came together share their gap.",
            buckets=_ITL_BUCKETS_S,
            registry=registry,
        )
        self.e2e_request_latency = Histogram(
            "forkpoint_e2e_request_latency_seconds",
            "From the arrival of a request to the end of a choice.",
            buckets=_LONG_BUCKETS_S,
            registry=registry,
        )
        self.queue_time = Histogram(
            "forkpoint_queue_time_seconds",
            "From submission to admission by the scheduler.",
            buckets=_TTFT_BUCKETS_S,
            registry=registry,
        )
        for reason in ("stop", "length", "abort", "error"):
            self.requests.labels(reason)

    def request(self) -> RequestTimer:
        """A timer for a request that arrives now."""
        return RequestTimer(self, time.monotonic())

    def refused(self, error: Exception) -> None:
        self.rejected.labels(_rejection_reason(error)).inc()


class RequestTimer:
    """Remembers when a request arrived."""

    def __init__(self, metrics: RequestMetrics, arrival_s: float) -> None:
        self._metrics = metrics
        self._arrival_s = arrival_s

    def choice(self) -> ChoiceTimer:
        return ChoiceTimer(self._metrics, self._arrival_s)


class ChoiceTimer:
    """Observes one choice. Times are those at which the API process looks, not when the engine sampled.

    Mutable: keeps its own times for traces, in seconds of time.monotonic(), and None until they are known.
    """

    def __init__(self, metrics: RequestMetrics, arrival_s: float) -> None:
        self.submitted_s = time.monotonic()
        self.queue_time_s: float | None = None
        self.first_token_s: float | None = None
        self.finished_s: float | None = None
        self.finish_reason: str | None = None
        self._metrics = metrics
        self._arrival_s = arrival_s
        self._last_token_s: float | None = None

    def started(self, queue_time_s: float) -> None:
        self.queue_time_s = queue_time_s
        self._metrics.queue_time.observe(queue_time_s)

    def tokens(self, num_tokens: int) -> None:
        if num_tokens == 0:
            return
        now_s = time.monotonic()
        if self._last_token_s is None:
            self.first_token_s = now_s
            self._metrics.time_to_first_token.observe(now_s - self._arrival_s)
        else:
            gap_s = (now_s - self._last_token_s) / num_tokens
            self._metrics.inter_token_latency.observe(gap_s, times=num_tokens)
        self._last_token_s = now_s

    def finished(self, reason: str) -> None:
        self.finish_reason = reason
        self.finished_s = time.monotonic()
        self._metrics.requests.labels(reason).inc()
        self._metrics.e2e_request_latency.observe(self.finished_s - self._arrival_s)


def _rejection_reason(error: Exception) -> str:
    match error:
        case RequestError(code=str(code)):
            return code
        case RequestError():
            return "invalid_request"
        case QueueFull():
            return "queue_full"
        case EngineLoading():
            return "loading"
        case EngineDraining():
            return "draining"
        case EngineDied():
            return "engine_dead"
        case _:
            return "internal_error"
