"""What one request asks of sampling and of its end; validated once, at the door."""

from __future__ import annotations

import math
from dataclasses import dataclass

from forkpoint.configs.errors import RequestError

MAX_SEED = 2**63 - 1
MIN_SEED = -(2**63)
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen, and when a sequence ends.

    Raw logits go through these in order: logit_bias, penalties, masks (min_tokens, grammar), temperature,
    top_k, top_p, min_p. temperature: 0 means argmax of what the masks left (lowest id wins a tie). top_k: 0
    means off. top_p: 1 means off. min_p: 0 means off.
    seed: random draws depend only on (seed, choice, position).
    max_tokens: at least 1 (0 only with scores_prompt); the server has clamped it to the room left.
    stop_token_ids: sampling one of them ends the sequence with reason `stop`; the end-of-text ids of the
    model are part of it unless the request set `ignore_eos`.
    min_tokens: none of stop_token_ids can be sampled before this many tokens were. A grammar that is complete
    ends the sequence all the same, since nothing may follow.
    presence_penalty, frequency_penalty: subtracted from the logits of generated tokens, once and per
    occurrence. repetition_penalty: divides positive and multiplies negative logits of the tokens of prompt
    and output (Keskar et al. 2019), before those two. logit_bias: (token id, value) pairs, added.
    num_logprobs: report the log-probability of each sampled token and this many most likely ones; None: do
    not. They are of the raw logits, before everything above. scores_prompt: report the prompt's tokens too,
    with as many.
    grammar: what the output must match, as llguidance's JSON text; None: anything. Complete, it ends the
    sequence with reason `stop`, an end-of-text token too, whatever ignore_eos says.
    """

    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int | None = None
    scores_prompt: bool = False
    grammar: str | None = None

    def __post_init__(self) -> None:
        _require_range("temperature", self.temperature, 0.0, 2.0)
        _require_range("top_p", self.top_p, 0.0, 1.0)
        _require_range("min_p", self.min_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p is 0; it must be in (0, 1]", param="top_p")
        if self.top_k < 0:
            raise RequestError(f"top_k is {self.top_k}; it must be 0 (off) or more", param="top_k")
        if self.max_tokens < (0 if self.scores_prompt else 1):
            raise RequestError(f"max_tokens is {self.max_tokens}; it must be 1 or more", param="max_tokens")
        if not MIN_SEED <= self.seed <= MAX_SEED:
            raise RequestError("seed does not fit in 64 bits", param="seed")
        self._check_adjustments()

    def _check_adjustments(self) -> None:
        _require_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _require_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0.0):
            raise RequestError(
                f"repetition_penalty is {self.repetition_penalty}; it must be above 0 and finite",
                param="repetition_penalty",
            )
        for token_id, value in self.logit_bias:
            if not -100.0 <= value <= 100.0:
                raise RequestError(
                    f"logit_bias of token {token_id} is {value}; it must be in [-100, 100]",
                    param="logit_bias",
                )
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}; it must be in [0, max_tokens = {self.max_tokens}]",
                param="min_tokens",
            )
        if self.num_logprobs is not None:
            _require_range("logprobs", self.num_logprobs, 0, MAX_LOGPROBS)


def _require_range(name: str, value: float, low: float, high: float) -> None:
    # `not (low <= value <= high)` also refuses NaN; a one-sided `value < low` would let it pass.
    if not (math.isfinite(value) and low <= value <= high):
        raise RequestError(f"{name} is {value}; it must be in [{low:g}, {high:g}]", param=name)
