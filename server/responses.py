"""/v1/responses without state: one request, one text, as one object or as typed events."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from forkpoint.configs.errors import RequestError
from forkpoint.server.answer_format import FinishedChoice, WireObject
from forkpoint.server.choice import ChoiceDelta, ChoiceEvent, ChoiceFinished, ChoiceStarted
from forkpoint.server.fields import Fields
from forkpoint.server.generation import GenerationRequest, Prompt
from forkpoint.server.generation_fields import read_generation_options
from forkpoint.server.message_pieces import ContentPiece, ReasoningPiece
from forkpoint.server.prompts import render_and_encode
from forkpoint.server.rendering import read_rendering
from forkpoint.server.responses_input import (
    as_chat_body,
    as_response_format,
    errors_of_text_format,
    read_input,
    read_reasoning_effort,
    refuse_unbuilt_response_fields,
)
from forkpoint.server.services import Services
from forkpoint.server.structured import checked_grammar, read_structure
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
            eos_token_ids=services.chat_end_token_ids,
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
        with errors_of_text_format():
            structure = await read_structure(as_response_format(body), services.grammars)
        assert services.dialect is not None, "a template has a dialect"
        prepared, rendering = services.dialect.prepared(messages, rendering, None)
        rendered = await render_and_encode(template, prepared, rendering, services.tokenizer, limits)
        plan = services.dialect.plan(
            None, structure, services.tokenizer.special_token_id, prompt_end=rendered.text_end
        )
        with errors_of_text_format():
            grammar = await checked_grammar(plan.rule, plan.param, services.grammars)
        options = replace(
            options,
            grammar=grammar,
            new_parser=plan.new_parser,
            shown_special_tokens=plan.shown_special_tokens,
        )
        max_tokens = limits.max_tokens(len(rendered.token_ids), options.max_tokens, default=None)
        echoed = {
            "instructions": Fields(body).string("instructions"),
            "max_output_tokens": options.max_tokens,
            "metadata": (Fields(body).object("metadata") or Fields({})).values,
            "temperature": options.temperature,
            "top_p": options.top_p,
            "text": Fields(body).get("text") or {"format": {"type": "text"}},
        }
        prompt = Prompt(rendered.token_ids, options.sampling(max_tokens), rendered.anchors)
        return ResponseRequest(options, (prompt,), echoed)

    def format(self, request: GenerationRequest, created: int) -> ResponseFormat:
        assert isinstance(request, ResponseRequest)
        fixed = {"created_at": created, "model": request.options.model, **_UNUSED, **request.echoed}
        return ResponseFormat(f"resp_{uuid.uuid4().hex}", fixed)


# What every response has in OpenAI's schema, and this API has nothing for.
_UNUSED: WireObject = {
    "error": None,
    "background": False,
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": False,
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
}


@dataclass(slots=True)
class _Item:
    """One item of the output; mutable while its text comes. status: as the API names it."""

    kind: Literal["message", "reasoning"]
    id: str
    texts: list[str] = field(default_factory=list)
    status: str = "in_progress"

    @property
    def part(self) -> WireObject:
        text = "".join(self.texts)
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def as_json(self, content: list[WireObject]) -> WireObject:
        beside: WireObject = {"summary": []} if self.kind == "reasoning" else {"role": "assistant"}
        return {"id": self.id, "type": self.kind, "status": self.status, **beside, "content": content}


@dataclass(slots=True)
class ResponseFormat:
    """OpenAI's `response`, and its events. Mutable: events are numbered, and the last ones repeat the text.

    The output is one message, after an item of reasoning where the model thinks first; each has one part.
    """

    response_id: str
    fixed: Mapping[str, object]
    _num_events: int = 0
    _items: list[_Item] = field(default_factory=list)
    _finish: ChoiceFinished | None = None

    def answer(self, choices: Sequence[FinishedChoice], usage: Usage) -> WireObject:
        (choice,) = choices
        if choice.reasoning:
            self._more("reasoning", choice.reasoning)
        if choice.content:
            self._more("message", choice.content)
        self._end(choice.finish)
        return self._response(usage)

    def chunks(self, event: ChoiceEvent) -> list[WireObject]:
        match event:
            case ChoiceStarted():
                kinds = ("response.created", "response.in_progress")
                return [self._event(kind, response=self._response(None)) for kind in kinds]
            case ChoiceDelta(pieces=pieces):
                events: list[WireObject] = []
                for piece in pieces:
                    # Calls cannot come: this API offers no tools.
                    if isinstance(piece, ContentPiece):
                        events += self._more("message", piece.text)
                    elif isinstance(piece, ReasoningPiece):
                        events += self._more("reasoning", piece.text)
                return events
            case ChoiceFinished():
                return self._end(event)
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

    def _more(self, kind: Literal["message", "reasoning"], text: str) -> list[WireObject]:
        """More text of this kind; an item of the other kind ends with it."""
        events = self._turn_to(kind)
        self._items[-1].texts.append(text)
        return [*events, self._text_event("delta", delta=text)]

    def _end(self, finish: ChoiceFinished) -> list[WireObject]:
        """The last item ends as the whole response does. There is a message even if there is no text."""
        events = self._turn_to("message")
        self._finish = finish
        return [*events, *self._close(self._status)]

    def _turn_to(self, kind: Literal["message", "reasoning"]) -> list[WireObject]:
        if self._items and self._items[-1].kind == kind:
            return []
        events = self._close("completed") if self._items else []
        item = _Item(kind, f"{'msg' if kind == 'message' else 'rs'}_{uuid.uuid4().hex}")
        self._items.append(item)
        added = self._event(
            "response.output_item.added", output_index=len(self._items) - 1, item=item.as_json([])
        )
        return [*events, added, self._part_event("response.content_part.added", part=item.part)]

    def _close(self, status: str) -> list[WireObject]:
        item = self._items[-1]
        item.status = status
        return [
            self._text_event("done", text="".join(item.texts)),
            self._part_event("response.content_part.done", part=item.part),
            self._event(
                "response.output_item.done",
                output_index=len(self._items) - 1,
                item=item.as_json([item.part]),
            ),
        ]

    def _event(self, kind: str, **content: object) -> WireObject:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **content}

    def _part_event(self, kind: str, **content: object) -> WireObject:
        """An event about the part of the item that is under way."""
        item = self._items[-1]
        return self._event(
            kind, item_id=item.id, output_index=len(self._items) - 1, content_index=0, **content
        )

    def _text_event(self, verb: str, **content: object) -> WireObject:
        if self._items[-1].kind == "reasoning":
            return self._part_event(f"response.reasoning_text.{verb}", **content)
        return self._part_event(f"response.output_text.{verb}", **content, logprobs=[])

    def _response(self, usage: Usage | None) -> WireObject:
        """usage: None while the response is in progress."""
        is_incomplete = self._status == "incomplete"
        return {
            "id": self.response_id,
            "object": "response",
            "status": self._status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_incomplete else None,
            "output": [] if usage is None else [item.as_json([item.part]) for item in self._items],
            "usage": None if usage is None else _usage(usage),
            **self.fixed,
        }


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
