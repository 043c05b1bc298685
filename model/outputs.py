"""What one step of the model gives back: arrays on the host, and which rows went wrong. Imports no torch."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at N places of one sequence: log-softmax of the raw logits, -inf where it is that.

    token_logprobs: [N] float32, of the token that is there. top_ids: [N, k] int32, the k most likely tokens,
    falling, the lowest id first among equals. top_logprobs: [N, k] float32.
    """

    token_logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.token_logprobs)

    @classmethod
    def none(cls, num_top: int) -> TokenLogprobs:
        """No place at all, with room for num_top tokens at each."""
        no_tokens = np.empty((0, num_top), dtype=np.int32)
        return cls(np.empty(0, dtype=np.float32), no_tokens, no_tokens.astype(np.float32))

    @classmethod
    def join(cls, parts: Sequence[TokenLogprobs]) -> TokenLogprobs:
        """All places of `parts`, in order; at least one part, all with the same k."""
        return cls(
            np.concatenate([part.token_logprobs for part in parts]),
            np.concatenate([part.top_ids for part in parts]),
            np.concatenate([part.top_logprobs for part in parts]),
        )

    def part(self, start: int, end: int, num_top: int) -> TokenLogprobs:
        """Places start..end with the first num_top tokens of each. A copy, which does not keep the rest."""
        places = slice(start, end)
        return TokenLogprobs(
            self.token_logprobs[places].copy(),
            self.top_ids[places, :num_top].copy(),
            self.top_logprobs[places, :num_top].copy(),
        )

    @property
    def is_damaged(self) -> bool:
        """Whether logits at some place were not finite."""
        return bool(np.isnan(self.token_logprobs).any())


class RowFault(enum.Enum):
    """Why no token was chosen for a row."""

    DAMAGED = "logits are not finite: weights or cached state are damaged"
    NOTHING_ALLOWED = "no token is left to choose from"


@dataclass(frozen=True, slots=True)
class StepOutput:
    """tokens: [S] int64, one for each of sample_rows; meaningless where there is a fault.

    faults and logprobs by index into sample_rows; logprobs are those of the chosen token, where asked for.
    scores: of the scored rows, N places, NaN where logits are damaged; None if no rows were to be scored.
    """

    tokens: NDArray[np.int64]
    faults: Mapping[int, RowFault] = field(default_factory=dict)
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    scores: TokenLogprobs | None = None
