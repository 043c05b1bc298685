"""One request's choice inside the engine: its tokens, how far they are computed, and what it holds."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from forkpoint.cache import Lease
from forkpoint.configs.sampling import SamplingParams
from forkpoint.scheduler.constraint import Constraint
from forkpoint.scheduler.messages import FinishReason, Submit


class Sequence:
    """A sequence from submit to finish. Mutable: it computes, grows, and may lose its lease and start again.

    There is one token array; every other length is a property of it.
    num_computed: positions whose state is computed. lease: None while it waits.
    prefill_end: where the present prefill ends: the prompt, and after a retraction what was generated too.
    most_computed: the highest num_computed ever, so that repeated work can be counted apart.
    num_cached, num_rebuilt: prompt tokens that were not computed anew, by how they came.
    first_full_hit, first_resume: F and R of the first admission. queue_time_s: until then; None before it.
    constraint: what its grammar allows; compiling is the grammar until that is known, None if there is none.
    next_scored: the first prompt position whose log-probability is still to be reported, where it is wanted.
    """

    __slots__ = (
        "_tokens",
        "anchors",
        "arrival_s",
        "choice",
        "compiling",
        "constraint",
        "first_full_hit",
        "first_resume",
        "lease",
        "most_computed",
        "namespace",
        "next_scored",
        "num_cached",
        "num_computed",
        "num_rebuilt",
        "num_tokens",
        "params",
        "prefill_end",
        "prompt_len",
        "queue_time_s",
        "uid",
    )

    def __init__(self, submit: Submit, *, arrival_s: float) -> None:
        self.uid = submit.uid
        self.params: SamplingParams = submit.params
        self.choice = submit.choice
        self.namespace = submit.namespace
        self.anchors = submit.anchors
        self.arrival_s = arrival_s
        self.prompt_len = len(submit.token_ids)
        self.num_tokens = self.prompt_len
        self._tokens: NDArray[np.int32] = np.empty(self.prompt_len + 64, dtype=np.int32)
        self._tokens[: self.prompt_len] = submit.token_ids
        self.lease: Lease | None = None
        self.num_computed = 0
        self.most_computed = 0
        self.num_cached = 0
        self.num_rebuilt = 0
        self.prefill_end = self.prompt_len
        self.first_full_hit = 0
        self.first_resume = 0
        self.queue_time_s: float | None = None
        self.compiling: Future[Constraint] | None = None
        self.constraint: Constraint | None = None
        # The first token follows nothing, so it has no log-probability.
        self.next_scored = 1 if submit.params.scores_prompt else self.prompt_len

    @property
    def tokens(self) -> NDArray[np.int32]:
        """[num_tokens] prompt and generated tokens. A view: valid until the next append."""
        return self._tokens[: self.num_tokens]

    def slice(self, start: int, end: int) -> NDArray[np.int32]:
        """Tokens start..end, end <= num_tokens. A view: valid until the next append."""
        return self._tokens[start:end]

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.prompt_len

    @property
    def num_remaining(self) -> int:
        """Rows to run until the next token can be sampled; at least 1 for a live sequence."""
        return self.num_tokens - self.num_computed

    @property
    def is_scoring(self) -> bool:
        """Whether log-probabilities of the prompt are still to be reported."""
        return self.next_scored < self.prompt_len

    @property
    def reusable_tokens(self) -> NDArray[np.int32]:
        """The tokens to match with the cache: it has no log-probabilities, so scoring computes all rows anew.

        The row that scores a token is the one before it, and a match leaves at least the last row to compute.
        """
        return self._tokens[: self.next_scored] if self.is_scoring else self.tokens

    @property
    def is_decoding(self) -> bool:
        return self.num_computed >= self.prefill_end

    @property
    def num_tokens_left(self) -> int:
        """How many tokens may still be sampled."""
        return self.params.max_tokens - self.num_generated

    def append(self, token: int) -> None:
        if self.num_tokens == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty(len(self._tokens), dtype=np.int32)])
        self._tokens[self.num_tokens] = token
        self.num_tokens += 1

    def finish_reason(self, context_length: int) -> FinishReason | None:
        """Why the sequence ends after its newest token, or None."""
        # For every sampled token: lengths are compared as they are, without the properties' calls.
        num_tokens, params = self.num_tokens, self.params
        num_generated = num_tokens - self.prompt_len
        if num_generated and self._tokens.item(num_tokens - 1) in params.stop_token_ids:
            return "stop"
        if num_generated >= params.max_tokens or num_tokens >= context_length:
            return "length"
        return None
