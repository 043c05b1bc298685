"""/v1/chat/completions: reads a chat request, and writes its answer as one object or in chunks."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forkpoint.configs.errors import RequestError
from forkpoint.server.answer_format import AnswerHead, FinishedText, WireObject
from forkpoint.server.chat_messages import num_characters, read_messages
from forkpoint.server.choice import ChoiceEvent, ChoiceFinished, ChoiceStarted
from forkpoint.server.fields import Fields
from forkpoint.server.generation import GenerationRequest, Prompt
from forkpoint.server.generation_fields import read_generation_options
from forkpoint.server.prompts import encode
from forkpoint.server.services import Services
from forkpoint.server.unbuilt_fields import refuse_unbuilt_fields
from forkpoint.server.usage import Usage


class ChatApi:
    """Reads and answers chat requests."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def read(self, body: Mapping[str, object]) -> GenerationRequest:
        """Validate everything, render and tokenise. Raises RequestError."""
        services = self._services
        limits = services.limits
        options = read_generation_options(
            body,
            served_names=services.config.served_model_names,
            eos_token_ids=services.tokenizer.eos_token_ids,
            vocab_size=limits.info.vocab_size,
        )
        refuse_unbuilt_fields(body, is_chat=True)
        template = services.template
        if template is None:
            raise RequestError(
                "this model has no chat template; give one with --chat-template, or use /v1/completions"
            )
        messages = read_messages(body.get("messages"))
        rendering = _read_rendering(Fields(body))
        # A template may add text but drops none of what matters here, so this bounds the rendered text too.
        limits.check_num_characters(num_characters(messages), services.tokenizer.max_token_characters)
        text = await asyncio.to_thread(
            template.render,
            messages,
            add_generation_prompt=rendering.add_generation_prompt,
            continue_final_message=rendering.continue_final_message,
            template_kwargs=rendering.template_kwargs,
        )
        token_ids = await encode(
            text, services.tokenizer, limits, add_special_tokens=rendering.add_special_tokens
        )
        max_tokens = limits.max_tokens(len(token_ids), options.max_tokens, default=None)
        return GenerationRequest(options, (Prompt(token_ids, options.sampling(max_tokens)),))

    def format(self, request: GenerationRequest, created: int) -> ChatFormat:
        return ChatFormat(AnswerHead(f"chatcmpl-{uuid.uuid4().hex}", created, request.options.model))


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """OpenAI's `chat.completion` and `chat.completion.chunk`."""

    head: AnswerHead

    def answer(self, choices: Sequence[FinishedText], usage: Usage) -> WireObject:
        return {
            **self.head.as_json("chat.completion"),
            "choices": [
                {
                    "index": choice.finish.index,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "logprobs": None,
                    "finish_reason": choice.finish.finish_reason,
                    "stop_reason": choice.finish.stop_reason,
                }
                for choice in choices
            ],
            "usage": usage.as_json(),
        }

    def chunk(self, event: ChoiceEvent) -> WireObject:
        choice: WireObject = {"index": event.index, "delta": {}, "logprobs": None, "finish_reason": None}
        if isinstance(event, ChoiceStarted):
            choice["delta"] = {"role": "assistant", "content": ""}
        elif isinstance(event, ChoiceFinished):
            choice |= {"finish_reason": event.finish_reason, "stop_reason": event.stop_reason}
        else:
            choice["delta"] = {"content": event.text}
        return {**self.head.as_json("chat.completion.chunk"), "choices": [choice]}

    def usage_chunk(self, usage: Usage) -> WireObject:
        return {**self.head.as_json("chat.completion.chunk"), "choices": [], "usage": usage.as_json()}


@dataclass(frozen=True, slots=True)
class _Rendering:
    """How a request wants its messages rendered and tokenised."""

    add_generation_prompt: bool
    continue_final_message: bool
    add_special_tokens: bool
    template_kwargs: Mapping[str, Any]


def _read_rendering(fields: Fields) -> _Rendering:
    continues = fields.boolean("continue_final_message", default=False)
    kwargs: dict[str, Any] = {}
    effort = fields.string("reasoning_effort")
    if effort is not None:
        kwargs["reasoning_effort"] = effort  # templates that know no effort ignore it
    given = fields.object("chat_template_kwargs")
    if given is not None:
        kwargs |= given.values
    return _Rendering(
        # Whoever asks for a continuation and says nothing else cannot want a new turn before it.
        add_generation_prompt=fields.boolean("add_generation_prompt", default=not continues),
        continue_final_message=continues,
        add_special_tokens=fields.boolean("add_special_tokens", default=False),
        template_kwargs=kwargs,
    )
