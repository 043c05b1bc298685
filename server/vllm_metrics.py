"""The same figures under vLLM's names, for the dashboards, autoscalers and routers that know those."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from forkpoint.scheduler.client import EngineClient
from forkpoint.server.engine_metrics import EngineMetrics, kv_cache_usage
from forkpoint.server.request_metrics import RequestMetrics

_COUNTERS = {
    "prefix_cache_queries": "prompt_tokens",
    "prefix_cache_hits": "cached_tokens",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "num_preemptions": "retractions",
}


class VllmAliases(Collector):
    """Holds no figures of its own: everything is read from the collectors it was given."""

    def __init__(
        self,
        model_name: str,
        engine: EngineClient,
        engine_metrics: EngineMetrics,
        request_metrics: RequestMetrics,
        registry: CollectorRegistry,
    ) -> None:
        self._model_name = model_name
        self._engine = engine
        self._engine_metrics = engine_metrics
        self._request_metrics = request_metrics
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        stats = self._engine.stats
        yield self._gauge("num_requests_running", stats.running)
        yield self._gauge("num_requests_waiting", stats.waiting)
        yield self._gauge("kv_cache_usage_perc", kv_cache_usage(stats))
        totals = self._engine_metrics.totals()
        for name, field_name in _COUNTERS.items():
            family = CounterMetricFamily(f"vllm:{name}", f"As forkpoint_{field_name}.", labels=["model_name"])
            family.add_metric([self._model_name], totals[field_name])
            yield family
        yield self._success_counter()
        requests = self._request_metrics
        yield self._histogram("time_to_first_token_seconds", requests.time_to_first_token)
        yield self._histogram("inter_token_latency_seconds", requests.inter_token_latency)
        yield self._histogram("e2e_request_latency_seconds", requests.e2e_request_latency)

    def _gauge(self, name: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", f"As vLLM's {name}.", labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _success_counter(self) -> Metric:
        family = CounterMetricFamily(
            "vllm:request_success", "As forkpoint_requests.", labels=["finished_reason", "model_name"]
        )
        for metric in self._request_metrics.requests.collect():
            for sample in metric.samples:
                if sample.name.endswith("_total") and sample.labels["finish_reason"] != "error":
                    family.add_metric([sample.labels["finish_reason"], self._model_name], sample.value)
        return family

    def _histogram(self, name: str, original: Collector) -> Metric:
        family = Metric(f"vllm:{name}", f"As forkpoint_{name}.", "histogram")
        for metric in original.collect():
            for sample in metric.samples:
                suffix = sample.name.removeprefix(f"forkpoint_{name}")
                if suffix != "_created":
                    labels = {**sample.labels, "model_name": self._model_name}
                    family.add_sample(f"vllm:{name}{suffix}", labels, sample.value)
        return family
