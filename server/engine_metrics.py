"""What the engine reports of itself, as Prometheus metrics: gauges, counters, and the size of its steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from forkpoint.scheduler.client import EngineClient
from forkpoint.scheduler.messages import EngineStats, PoolStats, StepTokens

_STEP_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_ROW_BUCKETS = tuple(2.0**i for i in range(15))

_PLAIN_COUNTERS = {
    "prompt_tokens": "Prompt tokens of admitted sequences.",
    "cached_tokens": "Prompt tokens whose prefill was skipped.",
    "rebuilt_tokens": "Prompt tokens whose sliding-window state was rebuilt.",
    "computed_tokens": "Prompt tokens that were computed.",
    "recomputed_tokens": "Tokens computed again after a retraction; in none of the others.",
    "generation_tokens": "Sampled tokens.",
    "retractions": "Running sequences that were put back into the queue.",
}
# metric, label, {label value: field of EngineStats}
_LABELLED_COUNTERS = (
    (
        "evicted_slots",
        "kind",
        "Cached slots freed for new work.",
        {"full": "evicted_full_slots", "swa": "evicted_swa_slots"},
    ),
    (
        "swa_windows",
        "event",
        "Sliding windows kept in, evicted from and rebuilt for the cache.",
        {"kept": "windows_kept", "evicted": "windows_evicted", "rebuilt": "windows_rebuilt"},
    ),
    (
        "branch_points",
        "event",
        "Points where prompts part: seen, their window kept, and resumed from.",
        {"found": "branch_points_found", "kept": "branch_points_kept", "hit": "branch_points_hit"},
    ),
)
_GAUGE_FIELDS = frozenset({"running", "waiting", "full", "swa"})
_COUNTER_FIELDS = tuple(name for name in EngineStats._fields if name not in _GAUGE_FIELDS)


@dataclass(frozen=True, slots=True)
class EngineTotals:
    """Counters since the server started, over all engines it had."""

    counts: dict[str, int]

    def __getitem__(self, name: str) -> int:
        return self.counts[name]


class EngineMetrics(Collector):
    """Reads the engine's statistics whenever /metrics is asked for.

    Mutable: an engine that is restarted counts from 0 again, so what its predecessors counted is kept here.
    """

    def __init__(self, engine: EngineClient, registry: CollectorRegistry) -> None:
        self._engine = engine
        self._before = dict.fromkeys(_COUNTER_FIELDS, 0)
        self._latest = EngineStats()  # as of the last step of the engine that runs now
        self._num_restarts = engine.num_restarts
        self._batch_rows = Histogram(
            "forkpoint_batch_rows", "Rows of one step.", buckets=_ROW_BUCKETS, registry=registry
        )
        self._step_seconds = Histogram(
            "forkpoint_step_seconds",
            "Duration of one step; phase is prefill if it had any prompt row.",
            ["phase"],
            buckets=_STEP_BUCKETS_S,
            registry=registry,
        )
        for phase in ("prefill", "decode"):
            self._step_seconds.labels(phase)
        registry.register(self)
        engine.on_step(self.observe_step)

    def observe_step(self, step: StepTokens) -> None:
        self._keep_counts_of_dead_engine()
        self._latest = step.stats
        num_rows = step.num_prefill_rows + step.num_decode_rows
        if num_rows == 0:  # a step that only reported an abort
            return
        self._batch_rows.observe(num_rows)
        self._step_seconds.labels("prefill" if step.num_prefill_rows else "decode").observe(step.step_s)

    def totals(self) -> EngineTotals:
        self._keep_counts_of_dead_engine()
        return EngineTotals(
            {name: before + getattr(self._latest, name) for name, before in self._before.items()}
        )

    def collect(self) -> Iterable[Metric]:
        totals = self.totals()
        stats = self._engine.stats
        yield GaugeMetricFamily("forkpoint_requests_running", "Sequences in the batch.", stats.running)
        yield GaugeMetricFamily("forkpoint_requests_waiting", "Sequences in the queue.", stats.waiting)
        yield _slots("forkpoint_full_slots", "Token slots of the full-attention pool.", stats.full)
        yield _slots("forkpoint_swa_slots", "Token slots of the sliding-window pool.", stats.swa)
        for name, help_text in _PLAIN_COUNTERS.items():
            yield CounterMetricFamily(f"forkpoint_{name}", help_text, totals[name])
        for name, label, help_text, field_of in _LABELLED_COUNTERS:
            family = CounterMetricFamily(f"forkpoint_{name}", help_text, labels=[label])
            for value, field_name in field_of.items():
                family.add_metric([value], totals[field_name])
            yield family
        yield CounterMetricFamily(
            "forkpoint_engine_restarts", "Times the engine was started again.", self._engine.num_restarts
        )

    def _keep_counts_of_dead_engine(self) -> None:
        if self._engine.num_restarts != self._num_restarts:
            self._num_restarts = self._engine.num_restarts
            for name in _COUNTER_FIELDS:
                self._before[name] += getattr(self._latest, name)
            self._latest = EngineStats()


def kv_cache_usage(stats: EngineStats) -> float:
    """The larger over both pools of the share that running sequences own or lock, as a fraction of 1."""
    pools = [pool for pool in (stats.full, stats.swa) if pool.capacity > 0]
    return max(((pool.leased + pool.locked) / pool.capacity for pool in pools), default=0.0)


def _slots(name: str, help_text: str, pool: PoolStats) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, help_text, labels=["state"])
    for state, slots in (("free", pool.free), ("tree", pool.tree), ("leased", pool.leased)):
        family.add_metric([state], slots)
    return family
