"""What follows from a step that the model ran: publish, append sampled tokens, end what is complete."""

from __future__ import annotations

from forkpoint.cache import PrefixCache
from forkpoint.configs.errors import RequestError
from forkpoint.model.outputs import RowFault, StepOutput, TokenLogprobs
from forkpoint.scheduler.limits import SchedulerLimits
from forkpoint.scheduler.messages import FinishReason, PromptScores
from forkpoint.scheduler.plan import Span, StepPlan
from forkpoint.scheduler.roster import Roster
from forkpoint.scheduler.sequence import Sequence


class Committer:
    """Takes outputs in. Holds no state of its own."""

    def __init__(self, roster: Roster, cache: PrefixCache, limits: SchedulerLimits) -> None:
        self._roster = roster
        self._cache = cache
        self._limits = limits

    def commit(self, plan: StepPlan, output: StepOutput) -> bool:
        """Take in what a step computed: publish, append sampled tokens, end what is complete.

        A row that went wrong ends its own sequence. Returns whether logits were damaged: what is cached may
        be the cause then.
        """
        num_sampled = num_scored = 0
        is_damaged = False
        tokens: list[int] = output.tokens.tolist()
        for span in plan.spans:
            if span.is_decode and num_sampled not in output.faults:
                self._take_decoded(span, num_sampled, tokens[num_sampled], output)
                num_sampled += 1
                continue
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
                self._roster.end(span.sequence, "error", message=f"the step failed: {RowFault.DAMAGED.value}")
                continue
            self._take_span(span, row, output, scores)
        return is_damaged

    def _take_decoded(self, span: Span, row: int, token: int, output: StepOutput) -> None:
        """As _take_span, of what nearly all spans are: one row of a decoding sequence, without a fault."""
        sequence, end = span.sequence, span.end
        assert sequence.lease is not None
        sequence.num_computed = end
        if end > sequence.most_computed:
            sequence.most_computed = end
        self._cache.advance(sequence.lease, end)
        if row in output.logprobs:
            self._roster.events.logprobs[sequence.uid] = output.logprobs[row]
        self._append(sequence, token)

    def _take_span(
        self, span: Span, row: int | None, output: StepOutput, scores: TokenLogprobs | None
    ) -> None:
        sequence = span.sequence
        if scores is not None:
            self._roster.events.prompt_scores.append(PromptScores(sequence.uid, sequence.next_scored, scores))
            sequence.next_scored += len(scores)
        is_last = span.is_last
        self._note_computed(span)
        if row is not None and row in output.faults:
            # Other than DAMAGED: its bans and its grammar together allow no token.
            self._roster.end(sequence, "error", message=output.faults[row].value, is_own_fault=True)
        elif row is not None:
            if (logprobs := output.logprobs.get(row)) is not None:
                self._roster.events.logprobs[sequence.uid] = logprobs
            self._append(sequence, int(output.tokens[row]))
        elif is_last:
            self._roster.end(sequence, "length")  # it asked for no token

    def _note_computed(self, span: Span) -> None:
        sequence = span.sequence
        sequence.num_computed = span.end
        sequence.most_computed = max(sequence.most_computed, span.end)
        if span.is_decode:
            self._cache.advance(span.lease, span.end)
        else:
            self._cache.commit(span.lease, sequence.tokens, span.end)

    def _append(self, sequence: Sequence, token: int) -> None:
        sequence.append(token)
        self._roster.events.uids.append(sequence.uid)
        self._roster.events.tokens.append(token)
        self._roster.counters.generation_tokens += 1
        reason = sequence.finish_reason(self._limits.context_length)
        if reason == "stop":
            self._roster.end(sequence, "stop", stop_token_id=token)
        elif sequence.constraint is not None:
            self._follow_grammar(sequence, token, reason)
        elif reason is not None:
            self._roster.end(sequence, reason)

    def _follow_grammar(self, sequence: Sequence, token: int, reason: FinishReason | None) -> None:
        """Move a grammar on past `token`; where nothing may follow it, the sequence ends with `stop`."""
        constraint = sequence.constraint
        assert constraint is not None
        try:
            constraint.advance(token)
        except RequestError as error:
            self._roster.end(sequence, "error", message=str(error), is_own_fault=True)
            return
        if constraint.is_complete:
            self._roster.end(sequence, "stop", stop_token_id=token if constraint.ends_with(token) else None)
        elif reason is not None:
            self._roster.end(sequence, reason)
