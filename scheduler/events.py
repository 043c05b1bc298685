"""What a scheduler tells of its work: totals, and what happened since it was asked last."""

from __future__ import annotations

from dataclasses import dataclass, field

from forkpoint.model.outputs import TokenLogprobs
from forkpoint.scheduler.messages import Finish, PromptScores, Started


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
