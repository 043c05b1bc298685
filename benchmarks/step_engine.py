"""The engine process of benchmarks/step_overhead.py: the real loop with marks in it, and no model."""

from __future__ import annotations

import cProfile
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter_ns

import numpy as np

from forkpoint.cache import CacheGeometry, PrefixCache
from forkpoint.configs.serving import EngineConfig
from forkpoint.configs.staircase import Staircase
from forkpoint.model.inputs import Draws, ForwardInput
from forkpoint.model.outputs import StepOutput
from forkpoint.scheduler.batch import draws_of
from forkpoint.scheduler.engine import Engine
from forkpoint.scheduler.engine_process import serve_pipe
from forkpoint.scheduler.limits import SchedulerLimits
from forkpoint.scheduler.messages import EngineInfo, LoadProgress, StepTokens
from forkpoint.scheduler.plan import StepPlan
from forkpoint.scheduler.scheduler import Scheduler

PARTS = ("plan", "inputs", "draws", "commit", "report", "messages")
# As Gemma 3 270M on a CPU server: its pattern and window, default page size and chunk.
PATTERN = "SSSSSF" * 3
WINDOW = 512
PAGE_SIZE = 16
CHUNK = 512
TILE = 64
VOCAB_SIZE = 262_144
MAX_RUNNING = 300
NUM_PAGES = 40_000


@dataclass(frozen=True, slots=True)
class StepSample:
    """One step's host time: all of it, and by part. The parts sum up to it but for the marks themselves."""

    step_ns: int
    parts_ns: dict[str, int]


@dataclass(slots=True)
class Marks:
    """When things happened in the present step, and the samples of those before. Mutable: a stopwatch."""

    samples: list[StepSample] = field(default_factory=list)
    plan: StepPlan | None = None
    entered_ns: int = 0
    planned_ns: int = 0
    built_ns: int = 0
    draws_ns: int = 0
    ran_ns: int = 0
    committed_ns: int = 0
    reported_ns: int = 0

    def close_step(self, now_ns: int) -> None:
        """The next step begins: what lies between the calls of the runner is what the step before cost."""
        if self.ran_ns:
            parts = {
                "plan": self.planned_ns - self.entered_ns,
                "inputs": self.built_ns - self.planned_ns - self.draws_ns,
                "draws": self.draws_ns,
                "commit": self.committed_ns - self.ran_ns,
                "report": self.reported_ns - self.committed_ns,
                "messages": now_ns - self.reported_ns,
            }
            self.samples.append(StepSample(sum(parts.values()), parts))
        self.entered_ns = now_ns


class MarkedScheduler(Scheduler):
    """A scheduler that notes when it has planned and committed."""

    marks: Marks

    def plan(self) -> StepPlan:
        plan = super().plan()
        self.marks.plan = plan
        self.marks.planned_ns = perf_counter_ns()
        return plan

    def commit(self, plan: StepPlan, output: StepOutput) -> bool:
        is_damaged = super().commit(plan, output)
        self.marks.committed_ns = perf_counter_ns()
        return is_damaged


class MarkedEngine(Engine):
    """An engine that notes when a step begins and when its report is made."""

    marks: Marks

    def step(self) -> StepTokens:
        self.marks.close_step(perf_counter_ns())
        report = super().step()
        self.marks.reported_ns = perf_counter_ns()
        return report


class FreeRunner:
    """Tokens that cost nothing. Makes the draws once more, since only so their share can be told."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._num_steps = 0

    def step(self, inputs: ForwardInput, draws: Draws) -> StepOutput:
        marks = self._marks
        marks.built_ns = perf_counter_ns()
        assert marks.plan is not None
        draws_of(marks.plan)
        marks.draws_ns = perf_counter_ns() - marks.built_ns
        self._num_steps += 1
        tokens = np.arange(self._num_steps, self._num_steps + len(inputs.sample_rows), dtype=np.int64)
        marks.ran_ns = perf_counter_ns()
        return StepOutput(tokens % VOCAB_SIZE)


def run_probed_engine(
    inbox: Connection, outbox: Connection, samples: Connection, profile: Path | None
) -> None:
    """Entry point: serve until told to end, then send the samples. profile: write a cProfile there."""
    marks = Marks()

    def build(_: EngineConfig, __: Callable[[LoadProgress], None]) -> Engine:
        return make_marked_engine(marks)

    profiler = cProfile.Profile()
    config = EngineConfig(Path())
    if profile is None:
        serve_pipe(config, inbox, outbox, build)
    else:
        profiler.runcall(serve_pipe, config, inbox, outbox, build)
        profiler.dump_stats(profile)
    samples.send_bytes(pickle.dumps(marks.samples))


def make_marked_engine(marks: Marks) -> Engine:
    """The default cache and scheduler of a CPU server, with room for everything."""
    geometry = CacheGeometry(PAGE_SIZE, WINDOW)
    limits = SchedulerLimits(
        geometry,
        context_length=1_000_000,
        max_rows=CHUNK,
        max_running=MAX_RUNNING,
        full_pages=NUM_PAGES,
        swa_pages=NUM_PAGES,
        chunk_grid=TILE,
    )
    config = EngineConfig(Path())
    cache = PrefixCache(
        geometry,
        full_pages=limits.full_pages,
        swa_pages=limits.swa_pages,
        retention=config.retention,
        eviction=config.radix_eviction_policy,
        staircase=Staircase(PATTERN, WINDOW, PAGE_SIZE, TILE),
    )
    scheduler = MarkedScheduler(cache, limits)
    engine = MarkedEngine(scheduler, FreeRunner(marks), kinds=("full", "swa"), info=_info(limits))
    scheduler.marks = engine.marks = marks
    return engine


def _info(limits: SchedulerLimits) -> EngineInfo:
    return EngineInfo(
        context_length=limits.context_length,
        vocab_size=VOCAB_SIZE,
        page_size=PAGE_SIZE,
        full_tokens=NUM_PAGES * PAGE_SIZE,
        swa_tokens=NUM_PAGES * PAGE_SIZE,
        window=WINDOW,
        margin=limits.geometry.margin,
        max_running_requests=MAX_RUNNING,
        chunked_prefill_size=CHUNK,
        dtype="none",
        device="none",
        attention_backend="none",
        layer_pattern=PATTERN,
        num_parameters=0,
    )
