"""Continuous batching: which rows run in the next step, and what follows from their tokens.

Roster holds the sequences; Planner, Chunks and Arrivals choose rows; Committer takes their tokens in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from forkpoint.cache import PrefixCache
from forkpoint.configs.errors import RequestError
from forkpoint.model.outputs import StepOutput
from forkpoint.scheduler.arrivals import Arrivals
from forkpoint.scheduler.chunks import Chunks
from forkpoint.scheduler.committer import Committer
from forkpoint.scheduler.constraint import Compilations
from forkpoint.scheduler.events import SchedulerCounters, StepEvents
from forkpoint.scheduler.limits import SchedulerLimits
from forkpoint.scheduler.messages import Finish, Submit
from forkpoint.scheduler.plan import StepPlan
from forkpoint.scheduler.planner import Planner
from forkpoint.scheduler.roster import Roster
from forkpoint.scheduler.sequence import Sequence
from forkpoint.scheduler.work import WorkMeter


class Scheduler:
    """Owns the sequences of one engine. Knows the cache, never the model."""

    def __init__(
        self,
        cache: PrefixCache,
        limits: SchedulerLimits,
        *,
        compilations: Compilations | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """compilations: None where the model has no tokenizer; requests with a grammar are refused then."""
        self.cache = cache
        self.limits = limits
        self._compilations = compilations
        self._clock = clock
        self._roster = Roster(cache)
        chunks = Chunks(self._roster, cache, limits, WorkMeter(cache.staircase))
        arrivals = Arrivals(self._roster, cache, limits, chunks=chunks, clock=clock)
        self._planner = Planner(self._roster, cache, chunks=chunks, arrivals=arrivals)
        self._committer = Committer(self._roster, cache, limits)

    @property
    def counters(self) -> SchedulerCounters:
        return self._roster.counters

    @property
    def num_running(self) -> int:
        return len(self._roster.running)

    @property
    def num_waiting(self) -> int:
        return len(self._roster.waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._roster.running or self._roster.waiting)

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._roster.running)

    def submit(self, submit: Submit) -> None:
        """Queue a sequence; one that can never fit ends at once with an error."""
        sequence = Sequence(submit, arrival_s=self._clock())
        try:
            self.limits.check(len(submit.token_ids), submit.params.max_tokens)
            self._start_grammar(sequence)
        except RequestError as error:
            finish = Finish(submit.uid, "error", message=str(error), is_own_fault=True)
            self._roster.events.finished.append(finish)
            return
        self._roster.enter(sequence)

    def _start_grammar(self, sequence: Sequence) -> None:
        grammar = sequence.params.grammar
        if grammar is None:
            return
        if self._compilations is None:
            raise RequestError("this model has no tokenizer that grammars could be followed with")
        sequence.compiling = self._compilations.start(grammar)

    def prepare_grammars(self) -> None:
        """Have the first grammar wait less: for a moment without work. Idempotent, returns at once."""
        if self._compilations is not None:
            self._compilations.prepare()

    def abort(self, uid: int) -> None:
        """End a sequence in whatever phase; unknown uids are ignored."""
        sequence = self._roster.find(uid)
        if sequence is not None:
            self._roster.end(sequence, "abort")

    def fail(self, sequences: Iterable[Sequence], message: str) -> None:
        """End sequences with an error: their step went wrong."""
        for sequence in list(sequences):
            self._roster.end(sequence, "error", message=message)

    def drop_cached_state(self) -> None:
        """Forget everything that is cached; what runs starts again from its tokens."""
        for sequence in reversed(self.running):
            self._roster.retract(sequence)
        is_flushed = self.cache.flush()
        assert is_flushed, "a lease is open that no running sequence holds"

    def take_events(self) -> StepEvents:
        """What happened since the last call; the caller owns it."""
        return self._roster.take_events()

    def plan(self) -> StepPlan:
        """Choose and reserve the rows of the next step.

        Empty only when there is no work, or when all that is left waits for its grammar; it then waits a bit.
        """
        return self._planner.plan()

    def commit(self, plan: StepPlan, output: StepOutput) -> bool:
        """Take in what a step computed.

        A row that went wrong ends its own sequence. Returns whether logits were damaged: what is cached may
        be the cause then.
        """
        return self._committer.commit(plan, output)
