"""How many tokens a request used, in OpenAI's shape."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """prompt_tokens: each prompt counted once, whatever n is. completion_tokens: all sampled tokens of all
    choices, those that ended a sequence included, up to the match of a stop string.

    cached_tokens, rebuilt_tokens: of the first choice of each prompt, as its admission reported them.
    reasoning_tokens: those of completion_tokens that went into the reasoning.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    rebuilt_tokens: int
    reasoning_tokens: int = 0

    def as_json(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": self.cached_tokens,
                "rebuilt_tokens": self.rebuilt_tokens,
            },
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }
