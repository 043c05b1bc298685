"""/v1/chat/completions: reads a chat request, and writes its answer as one object or in chunks."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forkpoint.configs.errors import RequestError
from forkpoint.server.answer_format import AnswerHead, FinishedText, WireObject
from forkpoint.server.chat_messages import read_messages
from forkpoint.server.choice import ChoiceEvent, ChoiceFinished, ChoiceStarted
from forkpoint.server.fields import Fields
from forkpoint.server.generation import GenerationRequest, Prompt
from forkpoint.server.generation_fields import read_generation_options
from forkpoint.server.prompts import render_and_encode
from forkpoint.server.rendering import read_rendering
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
        messages = read_messages(body.get("messages"), max_pieces=limits.info.context_length)
        token_ids, anchors = await render_and_encode(
            template, messages, read_rendering(Fields(body)), services.tokenizer, limits
        )
        max_tokens = limits.max_tokens(len(token_ids), options.max_tokens, default=None)
        return GenerationRequest(options, (Prompt(token_ids, options.sampling(max_tokens), anchors),))

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
