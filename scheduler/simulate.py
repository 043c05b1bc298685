"""Replays a trace through the real scheduler and prefix cache, without a model.

All requests are queued at the start and at most `concurrency` run at a time. Where a model would sample, the
trace says which token comes next.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np

from forkpoint.cache import CacheGeometry, PoolUse, PrefixCache
from forkpoint.cache.pages import num_pages_for
from forkpoint.configs.errors import ConfigError
from forkpoint.configs.sampling import SamplingParams
from forkpoint.configs.staircase import Staircase
from forkpoint.model.outputs import StepOutput
from forkpoint.scheduler.limits import SchedulerLimits
from forkpoint.scheduler.messages import Submit
from forkpoint.scheduler.plan import Span, StepPlan
from forkpoint.scheduler.scheduler import Scheduler
from forkpoint.scheduler.sequence import Sequence
from forkpoint.scheduler.simulate_report import RequestReport, SimulationReport
from forkpoint.scheduler.trace_ideal import ideal_hits
from forkpoint.scheduler.trace_pools import PoolSlots
from forkpoint.scheduler.traces import TraceRequest

# Beyond this many pages the free list alone takes gigabytes.
MAX_PAGES = 1 << 28


@dataclass(frozen=True, slots=True)
class SimulationSetup:
    """What a trace is replayed on.

    layers: one letter per layer, S (sliding window) or F (full). window: W of the S layers, counting the
    query. slots: rounded down to pages; swa is ignored without S layers. chunk: token budget of one step.
    """

    slots: PoolSlots
    page_size: int = 1
    window: int = 128
    layers: str = "SSSSSF" * 3
    chunk: int = 3072
    concurrency: int = 1
    retention: str = "anchors"
    eviction: str = "cost"
    rebuilds: bool = True

    @property
    def geometry(self) -> CacheGeometry:
        return CacheGeometry(self.page_size, self.window if "S" in self.layers else None)

    @property
    def full_pages(self) -> int:
        return self.slots.full // self.page_size

    @property
    def swa_pages(self) -> int:
        return self.slots.swa // self.page_size if "S" in self.layers else 0


def simulate(requests: Items[TraceRequest], setup: SimulationSetup) -> SimulationReport:
    """Run the trace to its end. Raises ConfigError for pools or requests that can never run."""
    replay = _Replay(requests, setup)
    replay.run()
    return replay.report()


class _Replay:
    """One run of a trace. Mutable: it counts as it goes."""

    def __init__(self, requests: Items[TraceRequest], setup: SimulationSetup) -> None:
        self._requests = requests
        self._setup = setup
        limits = _limits(requests, setup)
        geometry = setup.geometry
        self._staircase = None
        if geometry.window is not None and setup.rebuilds:
            self._staircase = Staircase(setup.layers, geometry.window, setup.page_size)
        self._cache = PrefixCache(
            geometry,
            full_pages=limits.full_pages,
            swa_pages=limits.swa_pages,
            retention=setup.retention,
            eviction=setup.eviction,
            staircase=self._staircase,
        )
        # Nobody asks how long a request waited.
        self._scheduler = Scheduler(self._cache, limits, clock=lambda: 0.0)
        self._sequences: dict[int, Sequence] = {}
        self._row_layers = 0
        self._peak_full_pages = 0
        self._peak_swa_pages = 0

    def run(self) -> None:
        """Queue all requests and step until none is left."""
        for uid, request in enumerate(self._requests):
            params = SamplingParams(seed=0, max_tokens=max(1, len(request.output)))
            self._scheduler.submit(Submit(uid, request.prompt, params, anchors=request.anchors))
        while self._scheduler.has_work:
            plan = self._scheduler.plan()
            assert plan.spans, "the scheduler has work and plans none"
            self._note(plan)
            tokens = [self._next_token(span.sequence) for span in plan.spans if span.samples]
            self._scheduler.commit(plan, StepOutput(np.array(tokens, dtype=np.int64)))
        finished = self._scheduler.take_events().finished
        assert len(finished) == len(self._requests)
        assert all(finish.reason == "length" for finish in finished), "a request did not run to its end"

    def _note(self, plan: StepPlan) -> None:
        for span in plan.spans:
            if not span.is_decode:
                self._sequences[span.sequence.uid] = span.sequence
                self._row_layers += self._cost(span)
        self._peak_full_pages = max(self._peak_full_pages, _needed(self._cache.full_use))
        swa = self._cache.swa_use
        if swa is not None:
            self._peak_swa_pages = max(self._peak_swa_pages, _needed(swa))

    def _cost(self, span: Span) -> int:
        """Row-layers of a prefill span; below a full hit only the upper layers run all its rows."""
        lease = span.lease
        if self._staircase is None or span.start >= lease.full_hit:
            return span.num_rows * len(self._setup.layers)
        return self._staircase.row_layers(lease.full_hit, lease.resume, span.start, span.end)

    def _next_token(self, sequence: Sequence) -> int:
        output = self._requests[sequence.uid].output
        # A request without output samples one token all the same, which is never computed.
        return int(output[sequence.num_generated]) if len(output) else 0

    def report(self) -> SimulationReport:
        """Totals after run(). Empties the cache to see that every page comes back."""
        size, num_layers = self._setup.page_size, len(self._setup.layers)
        counters, evicted = self._scheduler.counters, self._cache.counters
        entries = tuple(self._entry(uid) for uid in range(len(self._requests)))
        prompt = sum(entry.prompt_tokens for entry in entries)
        served = sum(entry.cached + entry.rebuilt for entry in entries)
        ideal = sum(ideal_hits(self._requests, size))
        evicted_full, evicted_swa = evicted.evicted_full_slots, evicted.evicted_swa_slots
        return SimulationReport(
            prompt_tokens=prompt,
            served_tokens=served,
            served_pct=_percentage(served, prompt),
            ideal_pct=_percentage(ideal, prompt),
            computed_tokens=sum(entry.computed for entry in entries),
            rebuilt_tokens=sum(entry.rebuilt for entry in entries),
            recomputed_tokens=counters.recomputed_tokens,
            row_layers=self._row_layers,
            row_layers_ideal=(prompt - ideal) * num_layers,
            row_layers_nocache=prompt * num_layers,
            peak_full_slots=self._peak_full_pages * size,
            peak_swa_slots=self._peak_swa_pages * size,
            evicted_full_slots=evicted_full,
            evicted_swa_slots=evicted_swa,
            retractions=counters.retractions,
            leaked_slots=self._leaked_pages() * size,
            requests=entries,
        )

    def _entry(self, uid: int) -> RequestReport:
        sequence = self._sequences[uid]
        return RequestReport(
            id=self._requests[uid].id,
            prompt_tokens=sequence.prompt_len,
            full_hit=sequence.first_full_hit,
            resume=sequence.first_resume,
            cached=sequence.num_cached,
            rebuilt=sequence.num_rebuilt,
            computed=sequence.prompt_len - sequence.num_cached - sequence.num_rebuilt,
        )

    def _leaked_pages(self) -> int:
        emptied = self._cache.flush()
        assert emptied, "a lease is open though no request runs"
        uses = (self._cache.full_use, self._cache.swa_use)
        return sum(use.capacity - use.free for use in uses if use is not None)


def _limits(requests: Items[TraceRequest], setup: SimulationSetup) -> SchedulerLimits:
    size = setup.page_size
    if max(setup.full_pages, setup.swa_pages) > MAX_PAGES:
        raise ConfigError(
            f"the pools have {setup.slots.full} full and {setup.slots.swa} SWA slots; "
            f"at most {MAX_PAGES * size} can be simulated",
            hint="ask for smaller pools by --full-slots and --swa-slots",
        )
    for request in requests:
        # A prompt needs a page to spare, and the last token of an answer is never computed.
        longest = len(request.prompt) + max(0, len(request.output) - 1)
        pages = max(num_pages_for(len(request.prompt), size) + 1, num_pages_for(longest, size))
        if pages > setup.full_pages:
            raise ConfigError(
                f"request {request.id} has a prompt of {len(request.prompt)} and an output of "
                f"{len(request.output)} tokens, which need {pages * size} full slots; there are "
                f"{setup.full_pages * size}",
                hint="give the pool more by --full-slots",
            )
    try:
        return SchedulerLimits(
            setup.geometry,
            context_length=max(len(request.prompt) + len(request.output) for request in requests) + 1,
            # Every running request must be able to decode in one step.
            max_rows=max(setup.chunk, setup.concurrency),
            max_running=setup.concurrency,
            full_pages=setup.full_pages,
            swa_pages=setup.swa_pages,
        )
    except ConfigError as error:
        raise ConfigError(str(error), hint="change the pools by --full-slots and --swa-slots") from error


def _needed(use: PoolUse) -> int:
    """Pages that running requests own or lock."""
    return use.leased + use.locked


def _percentage(part: int, whole: int) -> float:
    return round(100 * part / whole, 4)
