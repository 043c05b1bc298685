"""/v1/completions: reads a text completion request, and writes its answer as one object or in chunks."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forkpoint.configs.errors import RequestError
from forkpoint.server.answer_format import AnswerHead, FinishedText, WireObject
from forkpoint.server.choice import ChoiceEvent, ChoiceFinished, ChoiceStarted
from forkpoint.server.fields import Fields
from forkpoint.server.generation import GenerationRequest, Prompt
from forkpoint.server.generation_fields import read_generation_options
from forkpoint.server.prompts import encode, read_prompts
from forkpoint.server.services import Services
from forkpoint.server.unbuilt_fields import refuse_unbuilt_fields
from forkpoint.server.usage import Usage

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_SEQUENCES = 1024


class CompletionsApi:
    """Reads and answers text completion requests."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def read(self, body: Mapping[str, object]) -> GenerationRequest:
        """Validate everything and tokenise. Raises RequestError."""
        services = self._services
        limits = services.limits
        options = read_generation_options(
            body,
            served_names=services.config.served_model_names,
            eos_token_ids=services.tokenizer.eos_token_ids,
            vocab_size=limits.info.vocab_size,
        )
        refuse_unbuilt_fields(body, is_chat=False)
        add_special_tokens = Fields(body).boolean("add_special_tokens", default=True)
        given_prompts = read_prompts(body.get("prompt"), limits)
        num_sequences = len(given_prompts) * options.num_choices
        if num_sequences > MAX_SEQUENCES:
            raise RequestError(
                f"{len(given_prompts)} prompts with n {options.num_choices} are {num_sequences} sequences; "
                f"a request may have {MAX_SEQUENCES}",
                param="n",
            )
        prompts = []
        for given in given_prompts:
            if isinstance(given, str):
                token_ids = await encode(
                    given, services.tokenizer, limits, add_special_tokens=add_special_tokens
                )
            else:
                token_ids = given
            max_tokens = limits.max_tokens(len(token_ids), options.max_tokens, default=DEFAULT_MAX_TOKENS)
            prompts.append(Prompt(token_ids, options.sampling(max_tokens)))
        return GenerationRequest(options, tuple(prompts))

    def format(self, request: GenerationRequest, created: int) -> CompletionsFormat:
        return CompletionsFormat(AnswerHead(f"cmpl-{uuid.uuid4().hex}", created, request.options.model))


@dataclass(frozen=True, slots=True)
class CompletionsFormat:
    """OpenAI's `text_completion`, the same object name in answers and chunks."""

    head: AnswerHead

    def answer(self, choices: Sequence[FinishedText], usage: Usage) -> WireObject:
        return {
            **self.head.as_json("text_completion"),
            "choices": [_choice(choice.finish.index, choice.text, choice.finish) for choice in choices],
            "usage": usage.as_json(),
        }

    def chunk(self, event: ChoiceEvent) -> WireObject | None:
        if isinstance(event, ChoiceStarted):
            return None
        if isinstance(event, ChoiceFinished):
            choice = _choice(event.index, "", event)
        else:
            choice = _choice(event.index, event.text, None)
        return {**self.head.as_json("text_completion"), "choices": [choice]}

    def usage_chunk(self, usage: Usage) -> WireObject:
        return {**self.head.as_json("text_completion"), "choices": [], "usage": usage.as_json()}


def _choice(index: int, text: str, finish: ChoiceFinished | None) -> WireObject:
    return {
        "index": index,
        "text": text,
        "logprobs": None,
        "finish_reason": None if finish is None else finish.finish_reason,
        "stop_reason": None if finish is None else finish.stop_reason,
    }
