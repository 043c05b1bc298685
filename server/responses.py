"""/v1/responses without state: one request, one text, as one object or as typed events."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from forkpoint.configs.errors import RequestError
from forkpoint.server.answer_format import FinishedChoice, WireObject
from forkpoint.server.choice import ChoiceDelta, ChoiceEvent, ChoiceFinished, ChoiceStarted
from forkpoint.server.fields import Fields
from forkpoint.server.generation import GenerationRequest, Prompt
from forkpoint.server.generation_fields import read_generation_options
from forkpoint.server.message_pieces import ContentPiece
from forkpoint.server.prompts import render_and_encode
from forkpoint.server.rendering import read_rendering
from forkpoint.server.responses_input import (
    as_chat_body,
    read_input,
    read_reasoning_effort,
    refuse_unbuilt_response_fields,
)
from forkpoint.server.services import Services
from forkpoint.server.usage import Usage


@dataclass(frozen=True, slots=True)
class ResponseRequest(GenerationRequest):
    """A request of this API. echoed: the fields of the response that repeat the request."""

    echoed: Mapping[str, object] = field(default_factory=dict)


class ResponsesApi:
    """Reads and answers requests of /v1/responses."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def read(self, body: Mapping[str, object]) -> ResponseRequest:
        """Validate everything, render and tokenise. Raises RequestError."""
        services = self._services
        limits = services.limits
        options = read_generation_options(
            as_chat_body(body),
            served_names=services.config.served_model_names,
            eos_token_ids=services.tokenizer.eos_token_ids,
            vocab_size=limits.info.vocab_size,
            defaults=services.config.sampling_defaults,
        )
        # The last event of a stream always tells the usage.
        options = replace(options, has_usage=options.is_stream)
        refuse_unbuilt_response_fields(body)
        template = services.template
        if template is None:
            raise RequestError(
                "this model has no chat template; give one with --chat-template, or use /v1/completions"
            )
        messages = read_input(body, max_pieces=limits.info.context_length)
        rendering = read_rendering(Fields({"reasoning_effort": read_reasoning_effort(body)}))
        rendered = await render_and_encode(template, messages, rendering, services.tokenizer, limits)
        max_tokens = limits.max_tokens(len(rendered.token_ids), options.max_tokens, default=None)
        echoed = {
            "instructions": Fields(body).string("instructions"),
            "max_output_tokens": options.max_tokens,
            "metadata": (Fields(body).object("metadata") or Fields({})).values,
            "temperature": options.temperature,
            "top_p": options.top_p,
        }
        prompt = Prompt(rendered.token_ids, options.sampling(max_tokens), rendered.anchors)
        return ResponseRequest(options, (prompt,), echoed)

    def format(self, request: GenerationRequest, created: int) -> ResponseFormat:
        assert isinstance(request, ResponseRequest)
        fixed = {"created_at": created, "model": request.options.model, **_UNUSED, **request.echoed}
        return ResponseFormat(f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}", fixed)


# What every response has in OpenAI's schema, and this API has nothing for.
_UNUSED: WireObject = {
    "error": None,
    "background": False,
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": False,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
}


@dataclass(slots=True)
class ResponseFormat:
    """OpenAI's `response`, and its events. Mutable: events are numbered, and the last ones repeat the text.

    A response of this API is one message with one part of text.
    """

    response_id: str
    message_id: str
    fixed: Mapping[str, object]
    _num_events: int = 0
    _texts: list[str] = field(default_factory=list)
    _finish: ChoiceFinished | None = None

    def answer(self, choices: Sequence[FinishedChoice], usage: Usage) -> WireObject:
        (choice,) = choices
        self._texts, self._finish = [choice.content], choice.finish
        return self._response(usage)

    def chunks(self, event: ChoiceEvent) -> list[WireObject]:
        match event:
            case ChoiceStarted():
                return [
                    self._event("response.created", response=self._response(None)),
                    self._event("response.in_progress", response=self._response(None)),
                    self._event("response.output_item.added", output_index=0, item=self._message([])),
                    self._part_event("response.content_part.added", part=self._part("")),
                ]
            case ChoiceDelta(pieces=pieces):
                return [self._delta(piece.text) for piece in pieces if isinstance(piece, ContentPiece)]
            case ChoiceFinished():
                self._finish = event
                text = "".join(self._texts)
                part = self._part(text)
                return [
                    self._part_event("response.output_text.done", text=text, logprobs=[]),
                    self._part_event("response.content_part.done", part=part),
                    self._event("response.output_item.done", output_index=0, item=self._message([part])),
                ]
            case _:
                return []

    def plain_chunk(self, index: int, text: str) -> None:
        return None  # every event has a number of its own

    def usage_chunk(self, usage: Usage) -> WireObject:
        return self._event(f"response.{self._status}", response=self._response(usage))

    @property
    def _status(self) -> str:
        if self._finish is None:
            return "in_progress"
        return "incomplete" if self._finish.finish_reason == "length" else "completed"

    def _delta(self, text: str) -> WireObject:
        self._texts.append(text)
        return self._part_event("response.output_text.delta", delta=text, logprobs=[])

    def _event(self, kind: str, **content: object) -> WireObject:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **content}

    def _part_event(self, kind: str, **content: object) -> WireObject:
        return self._event(kind, item_id=self.message_id, output_index=0, content_index=0, **content)

    def _response(self, usage: Usage | None) -> WireObject:
        """usage: None while the response is in progress."""
        is_incomplete = self._status == "incomplete"
        return {
            "id": self.response_id,
            "object": "response",
            "status": self._status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_incomplete else None,
            "output": [] if usage is None else [self._message([self._part("".join(self._texts))])],
            "usage": None if usage is None else _usage(usage),
            **self.fixed,
        }

    def _message(self, content: list[WireObject]) -> WireObject:
        return {
            "id": self.message_id,
            "type": "message",
            "role": "assistant",
            "status": self._status,
            "content": content,
        }

    def _part(self, text: str) -> WireObject:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> WireObject:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": 0,  # what is kept for later costs nothing here, and is not counted
            "rebuilt_tokens": usage.rebuilt_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
