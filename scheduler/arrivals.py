"""Starting what waits: in order, where there is room, and when its grammar is known."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable

from forkpoint.cache import Match, PrefixCache
from forkpoint.configs.errors import RequestError
from forkpoint.model.outputs import TokenLogprobs
from forkpoint.scheduler.admission import Admission
from forkpoint.scheduler.chunks import Chunks
from forkpoint.scheduler.followers import is_computed_by
from forkpoint.scheduler.limits import SchedulerLimits
from forkpoint.scheduler.messages import PromptScores
from forkpoint.scheduler.plan import PlanDraft
from forkpoint.scheduler.roster import Roster
from forkpoint.scheduler.sequence import Sequence

# Followers that one step passes by at most, for each costs a match.
MAX_PASSED_BY = 64
# How long a step with nothing else to do waits for a grammar, before messages are looked at again.
GRAMMAR_WAIT_S = 0.01


class Arrivals:
    """Takes waiting sequences in. Holds no state of its own."""

    def __init__(
        self,
        roster: Roster,
        cache: PrefixCache,
        limits: SchedulerLimits,
        *,
        chunks: Chunks,
        clock: Callable[[], float],
    ) -> None:
        self._roster = roster
        self._cache = cache
        self._limits = limits
        self._chunks = chunks
        self._clock = clock
        self._admission = Admission(cache, limits)

    def plan(self, draft: PlanDraft) -> None:
        """Start waiting sequences in order and plan their first chunks; one that lacks pages blocks the rest.

        Passed by are followers, and those whose grammar is being compiled.
        """
        waiting, running = self._roster.waiting, self._roster.running
        passed_by: list[Sequence] = []
        while waiting and len(running) < self._limits.max_running:
            if draft.rows >= self._limits.max_rows or len(passed_by) >= MAX_PASSED_BY:
                break
            if not self._take_grammar(waiting[0]):
                continue
            sequence = waiting.popleft()
            if sequence.compiling is not None:
                passed_by.append(sequence)
                continue
            match = self._cache.match(sequence.reusable_tokens, sequence.namespace)
            if self._cache.enabled and is_computed_by(
                draft.chunks, sequence, match, self._limits.geometry.page_size
            ):
                passed_by.append(sequence)
                continue
            if not self._admission.fits(sequence, match, running):
                waiting.appendleft(sequence)
                break
            self._start(sequence, match)
            self._chunks.plan(sequence, draft)
        waiting.extendleft(reversed(passed_by))

    def wait_for_grammar(self) -> None:
        """Let a moment pass, or less when a grammar is compiled in it; none if no grammar is awaited."""
        compiling = [each.compiling for each in self._roster.waiting if each.compiling is not None]
        if compiling:
            concurrent.futures.wait(compiling, GRAMMAR_WAIT_S, return_when=concurrent.futures.FIRST_COMPLETED)

    def _take_grammar(self, sequence: Sequence) -> bool:
        """Give a sequence its constraint if it is compiled by now; False if it failed, which ends it."""
        if sequence.compiling is None or not sequence.compiling.done():
            return True
        try:
            sequence.constraint = sequence.compiling.result()
        except RequestError as error:
            self._roster.end(sequence, "error", message=str(error), is_own_fault=True)
            return False
        sequence.compiling = None
        return True

    def _start(self, sequence: Sequence, match: Match) -> None:
        roster, counters = self._roster, self._roster.counters
        roster.run(sequence, match)
        start = sequence.num_computed
        if sequence.queue_time_s is not None:
            counters.recomputed_tokens += max(0, sequence.most_computed - start)
            return
        sequence.queue_time_s = self._clock() - sequence.arrival_s
        sequence.first_full_hit, sequence.first_resume = match.full_len, match.resume_len
        rebuilt = 0 if self._cache.staircase is None else match.full_len - start
        counters.prompt_tokens += sequence.prompt_len
        if sequence.params.scores_prompt and not sequence.is_scoring:
            # A prompt of one token: there is nothing to score, which the reader must hear all the same.
            nothing = TokenLogprobs.none(sequence.params.num_logprobs or 0)
            roster.events.prompt_scores.append(PromptScores(sequence.uid, 1, nothing))
        roster.account(sequence, cached=start, rebuilt=rebuilt)
