"""/v1/chat/completions: reads a chat request, and writes its answer as one object or in chunks."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forkpoint.configs.errors import RequestError
from forkpoint.server.answer_format import AnswerHead, FinishedChoice, WireObject
from forkpoint.server.choice import ChoiceDelta, ChoiceEvent, ChoiceFinished, ChoiceStarted
from forkpoint.server.fields import Fields
from forkpoint.server.generation import GenerationRequest, Prompt
from forkpoint.server.generation_fields import MAX_LOGPROBS, read_generation_options
from forkpoint.server.logprobs import TokenBytes, chat_logprobs
from forkpoint.server.message_pieces import CallPiece, ContentPiece, MessagePiece, ReasoningPiece
from forkpoint.server.prompts import render_and_encode
from forkpoint.server.services import Services
from forkpoint.server.structured import checked_grammar, read_structure
from forkpoint.server.token_entries import TokenEntry
from forkpoint.server.tools_chat import read_chat
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
            eos_token_ids=services.chat_end_token_ids,
            vocab_size=limits.info.vocab_size,
            defaults=services.config.sampling_defaults,
        )
        options = replace(options, num_logprobs=_read_num_logprobs(Fields(body)))
        refuse_unbuilt_fields(body, is_chat=True)
        template = services.template
        if template is None:
            raise RequestError(
                "this model has no chat template; give one with --chat-template, or use /v1/completions"
            )
        assert services.dialect is not None, "a template has a dialect"
        chat = read_chat(body, services.dialect, max_pieces=limits.info.context_length)
        structure = await read_structure(body, services.grammars)
        rendered = await render_and_encode(
            template, chat.messages, chat.rendering, services.tokenizer, limits
        )
        plan = services.dialect.plan(
            chat.tools,
            structure,
            services.tokenizer.special_token_id,
            prompt_end=rendered.text_end,
            continued=chat.continued,
        )
        options = replace(
            options,
            grammar=await checked_grammar(plan.rule, plan.param, services.grammars),
            new_parser=plan.new_parser,
            shown_special_tokens=plan.shown_special_tokens,
        )
        max_tokens = limits.max_tokens(len(rendered.token_ids), options.max_tokens, default=None)
        prompt = Prompt(rendered.token_ids, options.sampling(max_tokens), rendered.anchors)
        return GenerationRequest(options, (prompt,))

    def format(self, request: GenerationRequest, created: int) -> ChatFormat:
        return ChatFormat(
            AnswerHead(f"chatcmpl-{uuid.uuid4().hex}", created, request.options.model),
            self._services.tokenizer.token_bytes,
            has_logprobs=request.options.num_logprobs is not None,
        )


def _read_num_logprobs(fields: Fields) -> int | None:
    """How many likely tokens to show in each place; None: no log-probabilities at all."""
    num_top = fields.integer("top_logprobs", low=0, high=MAX_LOGPROBS)
    if fields.boolean("logprobs", default=False):
        return num_top or 0
    if num_top:
        raise fields.error("top_logprobs", "needs `logprobs: true`")
    return None


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """OpenAI's `chat.completion` and `chat.completion.chunk`."""

    head: AnswerHead
    token_bytes: TokenBytes
    has_logprobs: bool

    @property
    def response_id(self) -> str:
        return self.head.id

    def answer(self, choices: Sequence[FinishedChoice], usage: Usage) -> WireObject:
        return {
            **self.head.as_json("chat.completion"),
            "choices": [
                {
                    "index": choice.finish.index,
                    "message": _message(choice),
                    "logprobs": self._logprobs(choice.entries),
                    "finish_reason": choice.finish.finish_reason,
                    "stop_reason": choice.finish.stop_reason,
                }
                for choice in choices
            ],
            "usage": usage.as_json(),
        }

    def chunks(self, event: ChoiceEvent) -> list[WireObject]:
        match event:
            case ChoiceStarted(index):
                return [self._chunk(index, {"role": "assistant", "content": ""})]
            case ChoiceDelta(index, pieces, entries):
                deltas = [_delta(piece) for piece in pieces] or [{}]
                first, *rest = [self._chunk(index, delta) for delta in deltas]
                if entries:
                    first["choices"][0]["logprobs"] = self._logprobs(entries)
                return [first, *rest]
            case ChoiceFinished(index, finish_reason, stop_reason):
                return [self._chunk(index, {}, finish_reason=finish_reason, stop_reason=stop_reason)]
            case _:
                return []

    def plain_chunk(self, index: int, text: str) -> WireObject:
        return self._chunk(index, {"content": text})

    def usage_chunk(self, usage: Usage) -> WireObject:
        return {**self.head.as_json("chat.completion.chunk"), "choices": [], "usage": usage.as_json()}

    def _chunk(self, index: int, delta: WireObject, **ending: object) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **ending}
        return {**self.head.as_json("chat.completion.chunk"), "choices": [choice]}

    def _logprobs(self, entries: Sequence[TokenEntry]) -> WireObject | None:
        return chat_logprobs(entries, self.token_bytes) if self.has_logprobs else None


def _message(choice: FinishedChoice) -> WireObject:
    message: WireObject = {"role": "assistant", "content": choice.content, "refusal": None}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.calls:
        message["content"] = choice.content or None
        message["tool_calls"] = [_call(call.name, call.arguments) for call in choice.calls]
    return message


def _delta(piece: MessagePiece) -> WireObject:
    match piece:
        case ContentPiece(text):
            return {"content": text}
        case ReasoningPiece(text):
            return {"reasoning_content": text}
        case CallPiece(call_index, name, arguments):
            if name is None:
                return {"tool_calls": [{"index": call_index, "function": {"arguments": arguments}}]}
            return {"tool_calls": [{"index": call_index, **_call(name, arguments)}]}


def _call(name: str, arguments: str) -> WireObject:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
