"""Continuous batching: which rows run in the next step, and what follows from their tokens.

A step's order: decode rows of running sequences, oldest first; chunks of prefills in progress; then waiting
sequences, first come first served. Pages are reserved as rows are planned, so a plan can always run.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from forkpoint.cache import Match, OutOfPages, PrefixCache
from forkpoint.configs.errors import RequestError
from forkpoint.model.outputs import RowFault, StepOutput, TokenLogprobs
from forkpoint.scheduler.admission import Admission
from forkpoint.scheduler.constraint import Compilations
from forkpoint.scheduler.followers import is_computed_by
from forkpoint.scheduler.limits import SchedulerLimits
from forkpoint.scheduler.messages import Finish, FinishReason, PromptScores, Started, Submit
from forkpoint.scheduler.plan import Span, StepPlan
from forkpoint.scheduler.sequence import Sequence
from forkpoint.scheduler.work import WorkMeter

# A prefill takes chunks of no more rows than this where larger ones would cost a kept window.
SHRUNK_CHUNK = 1024
# Followers that one step passes by at most, for each costs a match.
MAX_PASSED_BY = 64
# How long a step with nothing else to do waits for a grammar, before messages are looked at again.
GRAMMAR_WAIT_S = 0.01


@dataclass(slots=True)
class SchedulerCounters:
    """Totals in tokens, and events; mutable, they only grow."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    rebuilt_tokens: int = 0
    recomputed_tokens: int = 0
    generation_tokens: int = 0
    retractions: int = 0

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens - self.rebuilt_tokens


@dataclass(slots=True)
class StepEvents:
    """What happened since the last step: one sampled token per uid, scores, starts and ends.

    Mutable: it collects.
    """

    uids: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    finished: list[Finish] = field(default_factory=list)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_scores: list[PromptScores] = field(default_factory=list)


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
        self.counters = SchedulerCounters()
        self._admission = Admission(cache, limits)
        self._work = WorkMeter(cache.staircase)
        self._compilations = compilations
        self._clock = clock
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # in order of admission
        self._by_uid: dict[int, Sequence] = {}
        self._events = StepEvents()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._running)

    # ---- requests come and go

    def submit(self, submit: Submit) -> None:
        """Queue a sequence; one that can never fit ends at once with an error."""
        sequence = Sequence(submit, arrival_s=self._clock())
        try:
            self.limits.check(len(submit.token_ids), submit.params.max_tokens)
            self._start_grammar(sequence)
        except RequestError as error:
            finish = Finish(submit.uid, "error", message=str(error), is_own_fault=True)
            self._events.finished.append(finish)
            return
        assert submit.uid not in self._by_uid, f"uid {submit.uid} is in use"
        self._by_uid[submit.uid] = sequence
        self._waiting.append(sequence)

    def _start_grammar(self, sequence: Sequence) -> None:
        grammar = sequence.params.grammar
        if grammar is None:
            return
        if self._compilations is None:
            raise RequestError("this model has no tokenizer that grammars could be followed with")
        sequence.compiling = self._compilations.start(grammar)

    def abort(self, uid: int) -> None:
        """End a sequence in whatever phase; unknown uids are ignored."""
        sequence = self._by_uid.get(uid)
        if sequence is not None:
            self._end(sequence, "abort")

    def fail(self, sequences: Iterable[Sequence], message: str) -> None:
        """End sequences with an error: their step went wrong."""
        for sequence in list(sequences):
            self._end(sequence, "error", message=message)

    def drop_cached_state(self) -> None:
        """Forget everything that is cached; what runs starts again from its tokens."""
        for sequence in reversed(self.running):
            self._retract(sequence)
        is_flushed = self.cache.flush()
        assert is_flushed, "a lease is open that no running sequence holds"

    def take_events(self) -> StepEvents:
        """What happened since the last call; the caller owns it."""
        events, self._events = self._events, StepEvents()
        return events

    # ---- planning

    def plan(self) -> StepPlan:
        """Choose and reserve the rows of the next step.

        Empty only when there is no work, or when all that is left waits for its grammar; it then waits a bit.
        """
        while True:
            spans: list[Span] = []
            self._plan_decodes(spans)
            self._plan_prefills(spans)
            self._admit(spans)
            if spans or not self._running:
                if not spans:
                    self._wait_for_grammar()
                return StepPlan(tuple(spans))
            # Prefills hold all pages and none can go on: the newest gives way.
            self._give_way(self._running[-1])

    def _wait_for_grammar(self) -> None:
        compiling = [sequence.compiling for sequence in self._waiting if sequence.compiling is not None]
        if compiling:
            concurrent.futures.wait(compiling, GRAMMAR_WAIT_S, return_when=concurrent.futures.FIRST_COMPLETED)

    def _plan_decodes(self, spans: list[Span]) -> None:
        for sequence in list(self._running):
            if sequence.is_decoding and sequence.lease is not None and self._reserve_decode_row(sequence):
                start = sequence.num_computed
                spans.append(Span(sequence, start, start + 1, is_decode=True))

    def _reserve_decode_row(self, sequence: Sequence) -> bool:
        """Reserve one row, retracting newer sequences for it; False if `sequence` itself had to go."""
        while sequence.lease is not None:
            try:
                self.cache.extend(sequence.lease, sequence.num_computed + 1)
                return True
            except OutOfPages:
                self._give_way(self._running[-1])
        return False

    def _give_way(self, sequence: Sequence) -> None:
        """Retract the newest sequence; one that fills the pools alone ends with `length`."""
        if len(self._running) == 1 and sequence.is_decoding:
            self._end(sequence, "length")
            return
        assert len(self._running) > 1, "a sequence that fits the pools alone cannot go on"
        self._retract(sequence)

    def _retract(self, sequence: Sequence) -> None:
        self._release(sequence)
        self._running.remove(sequence)
        self._waiting.appendleft(sequence)
        self.counters.retractions += 1

    def _plan_prefills(self, spans: list[Span]) -> None:
        for sequence in self._running:
            if not sequence.is_decoding:
                self._jump_ahead(sequence)
                self._plan_chunk(sequence, spans)

    def _plan_chunk(self, sequence: Sequence, spans: list[Span]) -> bool:
        """Plan as many rows of a prefill as budget and pools allow; False when that is none."""
        lease = sequence.lease
        assert lease is not None
        start = sequence.num_computed
        # Early rows of a rebuild run in few layers and cost little, but each takes a slot all the same.
        budget = self.limits.max_rows - self._work.rows_of(spans)
        end = min(sequence.num_tokens, start + budget, self.cache.max_end(lease))
        # Rather several smaller chunks than a kept window lost.
        end = max(min(end, start + SHRUNK_CHUNK), min(end, self.cache.max_end_without_eviction(lease)))
        if end < sequence.num_tokens:
            end = self.limits.cut(start, end)
        if end <= start:
            return False
        self.cache.extend(lease, end)
        spans.append(Span(sequence, start, end, is_decode=False))
        return True

    def _jump_ahead(self, sequence: Sequence) -> None:
        """Take over what a neighbour has computed of this prefill meanwhile, where that is less work."""
        lease = sequence.lease
        assert lease is not None
        if not self.cache.enabled or sequence.num_computed < lease.full_hit:
            return
        match = self.cache.match(sequence.reusable_tokens, sequence.namespace)
        start, full_hit = sequence.num_computed, match.full_len
        gained = full_hit - start
        if gained <= 0 or self._work.row_layers_below(match) >= self._work.row_layers_of(gained):
            return
        # Borrowed before the old lease goes, or the window at `start` might go with it.
        self._acquire(sequence, match)
        self.cache.release(lease, sequence.tokens, start, keeps_end=False)
        assert sequence.lease is not None
        # Of the prompt, and only what was never computed: repeated work is counted apart.
        first = max(start, sequence.most_computed)
        reached, last = sequence.lease.start, min(full_hit, sequence.prompt_len)
        rebuilt = 0 if self.cache.staircase is None else max(0, last - max(reached, first))
        self._account(sequence, cached=max(0, min(reached, last) - first), rebuilt=rebuilt)

    # ---- admission

    def _admit(self, spans: list[Span]) -> None:
        """Start waiting sequences in order; one that lacks pages blocks the rest.

        Passed by are followers, and those whose grammar is being compiled.
        """
        passed_by: list[Sequence] = []
        while self._waiting and len(self._running) < self.limits.max_running:
            if self._work.rows_of(spans) >= self.limits.max_rows or len(passed_by) >= MAX_PASSED_BY:
                break
            if not self._take_grammar(self._waiting[0]):
                continue
            sequence = self._waiting.popleft()
            if sequence.compiling is not None:
                passed_by.append(sequence)
                continue
            match = self.cache.match(sequence.reusable_tokens, sequence.namespace)
            if self.cache.enabled and is_computed_by(spans, sequence, match, self.limits.geometry.page_size):
                passed_by.append(sequence)
                continue
            if not self._admission.fits(sequence, match, self._running):
                self._waiting.appendleft(sequence)
                break
            self._start(sequence, match)
            self._plan_chunk(sequence, spans)
        self._waiting.extendleft(reversed(passed_by))

    def _take_grammar(self, sequence: Sequence) -> bool:
        """Give a sequence its constraint if it is compiled by now; False if it failed, which ends it."""
        if sequence.compiling is None or not sequence.compiling.done():
            return True
        try:
            sequence.constraint = sequence.compiling.result()
        except RequestError as error:
            self._end(sequence, "error", message=str(error), is_own_fault=True)
            return False
        sequence.compiling = None
        return True

    def _start(self, sequence: Sequence, match: Match) -> None:
        self._acquire(sequence, match)
        sequence.prefill_end = sequence.num_tokens
        self._running.append(sequence)
        start = sequence.num_computed
        if sequence.queue_time_s is not None:
            self.counters.recomputed_tokens += max(0, sequence.most_computed - start)
            return
        sequence.queue_time_s = self._clock() - sequence.arrival_s
        sequence.first_full_hit, sequence.first_resume = match.full_len, match.resume_len
        rebuilt = 0 if self.cache.staircase is None else match.full_len - start
        self.counters.prompt_tokens += sequence.prompt_len
        if sequence.params.scores_prompt and not sequence.is_scoring:
            # A prompt of one token: there is nothing to score, which the reader must hear all the same.
            nothing = TokenLogprobs.none(sequence.params.num_logprobs or 0)
            self._events.prompt_scores.append(PromptScores(sequence.uid, 1, nothing))
        self._account(sequence, cached=start, rebuilt=rebuilt)

    def _acquire(self, sequence: Sequence, match: Match) -> None:
        lease = self.cache.acquire(match, prompt_len=sequence.prompt_len, anchors=sequence.anchors)
        sequence.lease = lease
        sequence.num_computed = lease.start

    def _account(self, sequence: Sequence, *, cached: int, rebuilt: int) -> None:
        """Tell which tokens of the prompt need not be computed, at first admission and at jumps after it."""
        assert sequence.queue_time_s is not None
        sequence.num_cached += cached
        sequence.num_rebuilt += rebuilt
        self.counters.cached_tokens += cached
        self.counters.rebuilt_tokens += rebuilt
        self._events.started.append(
            Started(sequence.uid, sequence.num_cached, sequence.num_rebuilt, sequence.queue_time_s)
        )

    # ---- after the model ran

    def commit(self, plan: StepPlan, output: StepOutput) -> bool:
        """Take in what a step computed: publish, append sampled tokens, end what is complete.

        A row that went wrong ends its own sequence. Returns whether logits were damaged: what is cached may
        be the cause then.
        """
        num_sampled = num_scored = 0
        is_damaged = False
        for span in plan.spans:
            row = num_sampled if span.samples else None
            num_sampled += span.samples
            scores = None
            if scored := span.scored:
                assert output.scores is not None
                num_top = span.sequence.params.num_logprobs or 0
                scores = output.scores.part(num_scored, num_scored + len(scored), num_top)
                num_scored += len(scored)
            is_faulty = row is not None and output.faults.get(row) is RowFault.DAMAGED
            if is_faulty or (scores is not None and scores.is_damaged):
                is_damaged = True
                self._end(span.sequence, "error", message=f"the step failed: {RowFault.DAMAGED.value}")
                continue
            self._take_span(span, row, output, scores)
        return is_damaged

    def _take_span(
        self, span: Span, row: int | None, output: StepOutput, scores: TokenLogprobs | None
    ) -> None:
        sequence = span.sequence
        if scores is not None:
            self._events.prompt_scores.append(PromptScores(sequence.uid, sequence.next_scored, scores))
            sequence.next_scored += len(scores)
        is_last = span.is_last
        self._note_computed(span)
        if row is not None and row in output.faults:
            # Other than DAMAGED: its bans and its grammar together allow no token.
            self._end(sequence, "error", message=output.faults[row].value, is_own_fault=True)
        elif row is not None:
            if (logprobs := output.logprobs.get(row)) is not None:
                self._events.logprobs[sequence.uid] = logprobs
            self._append(sequence, int(output.tokens[row]))
        elif is_last:
            self._end(sequence, "length")  # it asked for no token

    def _note_computed(self, span: Span) -> None:
        sequence = span.sequence
        sequence.num_computed = span.end
        sequence.most_computed = max(sequence.most_computed, span.end)
        if span.is_decode:
            self.cache.advance(span.lease, span.end)
        else:
            self.cache.commit(span.lease, sequence.tokens, span.end)

    def _append(self, sequence: Sequence, token: int) -> None:
        sequence.append(token)
        self._events.uids.append(sequence.uid)
        self._events.tokens.append(token)
        self.counters.generation_tokens += 1
        reason = sequence.finish_reason(self.limits.context_length)
        if reason == "stop":
            self._end(sequence, "stop", stop_token_id=token)
        elif sequence.constraint is not None:
            self._follow_grammar(sequence, token, reason)
        elif reason is not None:
            self._end(sequence, reason)

    def _follow_grammar(self, sequence: Sequence, token: int, reason: FinishReason | None) -> None:
        """Move a grammar on past `token`; where nothing may follow it, the sequence ends with `stop`."""
        constraint = sequence.constraint
        assert constraint is not None
        try:
            constraint.advance(token)
        except RequestError as error:
            self._end(sequence, "error", message=str(error), is_own_fault=True)
            return
        if constraint.is_complete:
            self._end(sequence, "stop", stop_token_id=token if constraint.ends_with(token) else None)
        elif reason is not None:
            self._end(sequence, reason)

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        stop_token_id: int | None = None,
        message: str | None = None,
        is_own_fault: bool = False,
    ) -> None:
        if sequence.lease is not None:
            self._release(sequence)
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        del self._by_uid[sequence.uid]
        self._events.finished.append(Finish(sequence.uid, reason, stop_token_id, message, is_own_fault))

    def _release(self, sequence: Sequence) -> None:
        assert sequence.lease is not None
        self.cache.release(sequence.lease, sequence.tokens, sequence.num_computed)
        sequence.lease = None
        sequence.num_computed = 0
