"""The engine's heart: take messages, run one step, say what it did. No pipe, no process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Protocol

import structlog

from forkpoint.cache.prefix_cache import PoolUse
from forkpoint.model.inputs import Draws, ForwardInput, Kind
from forkpoint.model.outputs import StepOutput
from forkpoint.scheduler.batch import build_forward_input, draws_of
from forkpoint.scheduler.messages import (
    Abort,
    CacheDescribed,
    DescribeCache,
    EngineInfo,
    EngineStats,
    FlushCache,
    FlushDone,
    PoolStats,
    StepTokens,
    Submit,
)
from forkpoint.scheduler.plan import StepPlan
from forkpoint.scheduler.scheduler import Scheduler

log = structlog.get_logger("forkpoint.engine")

MAX_FAILED_STEPS = 3


class Runner(Protocol):
    """What runs a step: the model, or a double that checks its tables."""

    def step(self, inputs: ForwardInput, draws: Draws) -> StepOutput:
        """One token for each of inputs.sample_rows, and the scores of inputs.scored."""
        ...


class EngineBroken(Exception):
    """Several steps in a row failed: the device or the process is not to be trusted any more."""


class Engine:
    """Scheduler and runner, stepped from outside. One thread only."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        kinds: Collection[Kind],
        info: EngineInfo,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.info = info
        self._runner = runner
        self._kinds = kinds
        self._clock = clock
        self._num_steps = 0
        self._num_failed_in_a_row = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def handle(
        self, message: Submit | Abort | FlushCache | DescribeCache
    ) -> FlushDone | CacheDescribed | None:
        """Take one message in; FlushCache and DescribeCache have an answer of their own."""
        if isinstance(message, Submit):
            self.scheduler.submit(message)
        elif isinstance(message, Abort):
            self.scheduler.abort(message.uid)
        elif isinstance(message, DescribeCache):
            tree = self.scheduler.cache.describe(max_nodes=message.max_nodes)
            return CacheDescribed(message.ticket, tree, self.stats())
        else:
            cleared = not self.scheduler.has_work and self.scheduler.cache.flush()
            return FlushDone(message.ticket, cleared, self.stats())
        return None

    def step(self) -> StepTokens:
        """Run one step, if there is work, and report it with everything that happened before it.

        A step that raises ends the requests in it with an error. A row whose logits are not finite ends its
        own request, and everything that is cached goes. Raises EngineBroken when steps in a row give nothing.
        """
        started_s = self._clock()
        plan = self.scheduler.plan()
        num_rebuild_rows = plan.num_rebuild_rows  # before the step: what ends in it has no lease any more
        if plan.spans:
            self._run(plan)
        events = self.scheduler.take_events()
        return StepTokens(
            uids=events.uids,
            tokens=events.tokens,
            started=tuple(events.started),
            finished=tuple(events.finished),
            stats=self.stats(),
            step_s=self._clock() - started_s,
            num_prefill_rows=plan.num_prefill_rows,
            num_rebuild_rows=num_rebuild_rows,
            num_decode_rows=plan.num_decode_rows,
            logprobs=events.logprobs,
            prompt_scores=tuple(events.prompt_scores),
        )

    def _run(self, plan: StepPlan) -> None:
        try:
            stairs = self.scheduler.cache.staircase
            inputs = build_forward_input(plan, self._kinds, self.info.page_size, stairs)
            output = self._runner.step(inputs, draws_of(plan))
        except Exception as error:
            log.exception("step_failed", num_sequences=len(plan.spans))
            self.scheduler.fail(
                [span.sequence for span in plan.spans], f"the step failed: {type(error).__name__}"
            )
            self._count_failed_step(error)
            return
        self._num_steps += 1
        if not self.scheduler.commit(plan, output):
            self._num_failed_in_a_row = 0
            return
        # Damaged state may have been published by an earlier chunk: all who share it would fail. What runs
        # computes its state anew, from the same tokens.
        log.error("logits_not_finite", num_sequences=len(plan.spans), num_faults=len(output.faults))
        self.scheduler.drop_cached_state()
        if len(output.faults) == len(output.tokens):
            self._count_failed_step(None)

    def _count_failed_step(self, cause: Exception | None) -> None:
        self._num_failed_in_a_row += 1
        if self._num_failed_in_a_row >= MAX_FAILED_STEPS:
            raise EngineBroken(f"{MAX_FAILED_STEPS} steps in a row failed") from cause

    def stats(self) -> EngineStats:
        scheduler, cache = self.scheduler, self.scheduler.cache
        size = self.info.page_size
        counters, cached = scheduler.counters, cache.counters
        return EngineStats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            full=_pool_stats(cache.full_use, size),
            swa=_pool_stats(cache.swa_use, size),
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            rebuilt_tokens=counters.rebuilt_tokens,
            computed_tokens=counters.computed_tokens,
            recomputed_tokens=counters.recomputed_tokens,
            generation_tokens=counters.generation_tokens,
            evicted_full_slots=cached.evicted_full_slots,
            evicted_swa_slots=cached.evicted_swa_slots,
            windows_kept=cached.windows_kept,
            windows_evicted=cached.windows_evicted,
            windows_rebuilt=cached.windows_rebuilt,
            branch_points_found=cached.branch_points_found,
            branch_points_kept=cached.branch_points_kept,
            branch_points_hit=cached.branch_points_hit,
            retractions=counters.retractions,
            num_steps=self._num_steps,
        )


def _pool_stats(use: PoolUse | None, page_size: int) -> PoolStats:
    if use is None:
        return PoolStats()
    return PoolStats(
        free=use.free * page_size,
        tree=use.tree * page_size,
        locked=use.locked * page_size,
        leased=use.leased * page_size,
        capacity=use.capacity * page_size,
    )
