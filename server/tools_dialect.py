"""How one model speaks of tools and reasoning: what its template knows, and in which formats it writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from forkpoint.configs.errors import ConfigError, RequestError
from forkpoint.server.chat_messages import Message
from forkpoint.server.message_pieces import MessageParser, NewParser
from forkpoint.server.parsers.formats import (
    CALL_FORMATS,
    REASONING_CHANNELS,
    REASONING_TAGS,
    CallFormat,
    detect_call_format,
    detect_reasoning,
)
from forkpoint.server.parsers.harmony_history import as_harmony_messages, as_harmony_tools
from forkpoint.server.parsers.harmony_rules import channels_rule, written_header
from forkpoint.server.parsers.machine import CallsAlone, PlainText
from forkpoint.server.parsers.think import ThinkParser, ThinkTags
from forkpoint.server.rendering import Rendering
from forkpoint.server.structured import Structure
from forkpoint.server.structured_rules import OutputRule, SpecialTokenId, after_thinking, either
from forkpoint.server.text_ports import PromptTemplate
from forkpoint.server.tools import Tools
from forkpoint.server.tools_rules import calls_rule
from forkpoint.server.tools_text import described, with_calls_as_text

_PROBE = "\ue000probe"
_PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": _PROBE, "description": _PROBE, "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """How the output of a chat is bound and read; see GenerationOptions. param: the field that binds it."""

    rule: OutputRule | None
    param: str
    new_parser: NewParser | None
    shown_special_tokens: frozenset[str]


@dataclass(frozen=True, slots=True)
class Dialect:
    """call_format, reasoning: None: calls and reasoning are not looked for, and stay in the content.

    channels: the format of a model that writes all in channels; reasoning is one of them then, not tags.
    """

    call_format: CallFormat | None
    reasoning: ThinkTags | CallFormat | None
    channels: CallFormat | None
    template_knows_tools: bool
    template_knows_system: bool

    @classmethod
    def of(cls, template: PromptTemplate, *, tool_call_parser: str, reasoning_parser: str) -> Dialect:
        """The parsers by name; `auto`: found out from the template; `none`: no such one.

        Raises ConfigError for two that cannot read the same output.
        """
        call_format, reasoning = _formats(template.source, tool_call_parser, reasoning_parser)
        question = [{"role": "user", "content": _PROBE}]
        instructed = [{"role": "system", "content": f"{_PROBE}system"}, *question]
        return cls(
            call_format,
            reasoning,
            _channels(call_format, reasoning),
            template_knows_tools=_rendered(template, question, [_PROBE_TOOL])
            not in (None, _rendered(template, question)),
            template_knows_system=f"{_PROBE}system" in (_rendered(template, instructed) or ""),
        )

    @property
    def end_markers(self) -> tuple[str, ...]:
        """Special tokens after which nothing follows in an answer."""
        return self.channels.end_markers if self.channels is not None else ()

    def prepared(
        self, messages: Sequence[Message], rendering: Rendering, tools: Tools | None
    ) -> tuple[Sequence[Message], Rendering]:
        """Messages and rendering as the template is to see them."""
        definitions = tools.definitions if tools is not None else ()
        if self.channels is not None:
            messages, definitions = as_harmony_messages(messages), as_harmony_tools(definitions)
        if self.template_knows_tools:
            return messages, replace(rendering, tools=definitions) if tools else rendering
        messages = with_calls_as_text(messages)
        if tools is not None:
            messages = described(messages, tools.definitions, knows_system=self.template_knows_system)
        return messages, rendering

    def plan(
        self,
        tools: Tools | None,
        structure: Structure | None,
        special_id: SpecialTokenId,
        *,
        prompt_end: str,
        continued: str = "",
    ) -> AnswerPlan:
        """What binds the output and what reads it. Raises RequestError.

        prompt_end: the last characters of the prompt. continued: the message that the output goes on with.
        """
        if tools is not None and tools.mode == "required" and structure is not None:
            raise RequestError(
                f"{structure.param.split('.')[0]} cannot be combined with a tool_choice that forces a call",
                param=structure.param.split(".")[0],
            )
        call_format = self.call_format if tools is not None and tools.mode != "none" else None
        if tools is not None and tools.mode == "required" and call_format is None:
            raise RequestError(
                "tool_choice forces a call, but this server reads none (--tool-call-parser none)",
                param="tool_choice",
            )
        answer, calls, param = self._rules(tools, structure, call_format, special_id)
        new_parser, markers = self._reader(tools, call_format)
        if self.channels is not None:
            header = written_header(prompt_end, continued)
            is_bound = answer is not None or calls is not None
            rule = channels_rule(answer, calls, special_id, header=header) if is_bound else None
            return AnswerPlan(rule, param, _begun(new_parser, header), markers)
        if answer is None and calls is not None and new_parser is not None:
            new_parser = _calls_alone(new_parser)
        given = [each for each in (answer, calls) if each is not None]
        rule = either(*given) if len(given) > 1 else given[0] if given else None
        if isinstance(self.reasoning, ThinkTags):
            is_open = _opens(self.reasoning, prompt_end, continued)
            if rule is not None:
                rule = after_thinking(rule, self.reasoning, special_id, is_open=is_open)
            new_parser = _thinking(self.reasoning, new_parser, is_open=is_open)
            markers |= {self.reasoning.opening, self.reasoning.closing}
        return AnswerPlan(rule, param, new_parser, markers)

    def _rules(
        self,
        tools: Tools | None,
        structure: Structure | None,
        call_format: CallFormat | None,
        special_id: SpecialTokenId,
    ) -> tuple[OutputRule | None, OutputRule | None, str]:
        """What binds the answer's text, what binds calls in place of it, and the field that does."""
        if tools is not None and tools.mode == "required" and call_format is not None:
            return None, calls_rule(tools, call_format.syntax, call_format.markers, special_id), "tool_choice"
        if structure is None:
            return None, None, ""
        if tools is None or call_format is None or call_format.marked_syntax is None:
            return structure.rule, None, structure.param
        # The model may call or answer; what it answers has the form that was asked for.
        calls = calls_rule(tools, call_format.marked_syntax, call_format.markers, special_id)
        return structure.rule, calls, structure.param

    def _reader(
        self, tools: Tools | None, call_format: CallFormat | None
    ) -> tuple[NewParser | None, frozenset[str]]:
        if tools is None or call_format is None:
            if self.channels is None:
                return None, frozenset()
            # Its other channels are there to be read, and no message of it is a call.
            new_parser = self.channels.new_parser(
                {}, is_closed=True, tells_reasoning=self.reasoning is not None
            )
            return new_parser, frozenset(self.channels.markers)
        schemas = {function.name: function.parameter_schemas for function in tools.callable}
        new_parser = call_format.new_parser(
            schemas,
            tools.max_calls,
            is_closed=tools.has_forbidden,
            tells_reasoning=self.reasoning is not None,
        )
        return new_parser, frozenset(call_format.markers)


def _formats(
    source: str, tool_call_parser: str, reasoning_parser: str
) -> tuple[CallFormat | None, ThinkTags | CallFormat | None]:
    """The formats of calls and reasoning by their names, or as the template's text tells where one is `auto`.

    Where one of the two is named and has channels, `auto` for the other means the same.
    """
    if tool_call_parser == "auto" and reasoning_parser in REASONING_CHANNELS:
        call_format: CallFormat | None = REASONING_CHANNELS[reasoning_parser]
    elif tool_call_parser == "none":
        call_format = None
    else:
        name = detect_call_format(source) if tool_call_parser == "auto" else tool_call_parser
        call_format = CALL_FORMATS[name]
    if reasoning_parser == "auto" and call_format is not None and call_format.has_channels:
        return call_format, call_format
    tags = detect_reasoning(source) if reasoning_parser == "auto" else reasoning_parser
    if tags is None or tags == "none":
        return call_format, None
    return call_format, REASONING_CHANNELS[tags] if tags in REASONING_CHANNELS else REASONING_TAGS[tags]


def _channels(call_format: CallFormat | None, reasoning: ThinkTags | CallFormat | None) -> CallFormat | None:
    """The format of whole outputs that one of them is, and the other no different one. Raises ConfigError."""
    whole = [each for each in (call_format, reasoning) if isinstance(each, CallFormat) and each.has_channels]
    if whole and any(each not in (None, whole[0]) for each in (call_format, reasoning)):
        raise ConfigError(
            "harmony is a format of calls and reasoning together, and cannot be combined with another one",
            hint="give --tool-call-parser and --reasoning-parser the same, or `none` to one of them",
        )
    return whole[0] if whole else None


def _begun(new_parser: NewParser | None, header: str) -> NewParser | None:
    """Parsers that have read `header`, of which they tell nothing."""
    if new_parser is None or not header:
        return new_parser
    new = new_parser

    def new_begun_parser() -> MessageParser:
        parser = new()
        pieces = parser.push(header)
        assert not pieces, "a header is no part of a message"
        return parser

    return new_begun_parser


def _calls_alone(new_parser: NewParser) -> NewParser:
    return lambda: CallsAlone(new_parser())


def _opens(tags: ThinkTags, prompt_end: str, continued: str) -> bool:
    """Whether the output begins inside of the reasoning."""
    if continued:
        _, tag, thought = continued.rpartition(tags.opening)
        return bool(tag) and tags.closing not in thought
    return prompt_end.rstrip().endswith(tags.opening)


def _thinking(tags: ThinkTags, new_parser: NewParser | None, *, is_open: bool) -> NewParser:
    return lambda: ThinkParser(tags, new_parser or PlainText, is_open=is_open)


def _rendered(
    template: PromptTemplate, messages: Sequence[Message], tools: Sequence[Any] | None = None
) -> str | None:
    try:
        return template.render(messages, tools=tools)
    except RequestError:
        return None
