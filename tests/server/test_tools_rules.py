"""Random outputs that the grammars allow, token by token: the parsers read valid calls, and nothing else."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
import tokenizers
from text.tiny_tokenizers import byte_level
from tokenizers import AddedToken

from forkpoint.scheduler.grammar import GrammarCompiler
from forkpoint.server.detokenize import IncrementalDetokenizer
from forkpoint.server.fields import Fields
from forkpoint.server.message_pieces import CallPiece, ContentPiece, MessagePiece, ReasoningPiece, joined
from forkpoint.server.parsers.formats import CALL_FORMATS, REASONING_TAGS
from forkpoint.server.parsers.machine import PlainText
from forkpoint.server.parsers.think import THINK, ThinkParser
from forkpoint.server.structured_rules import OutputRule, after_thinking, either, schema_rule
from forkpoint.server.structured_schema import read_schema
from forkpoint.server.text import Tokenizer
from forkpoint.server.tools import read_tools
from forkpoint.server.tools_rules import MAX_FORCED_CALLS, calls_rule

MARKERS = sorted(
    {marker for each in CALL_FORMATS.values() for marker in each.markers}
    | {tag for tags in REASONING_TAGS.values() for tag in (tags.opening, tags.closing)}
)
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/c"}, "days": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"c": {"type": "string", "maxLength": 3}},
}
# The second is the beginning of the third; the last has a name with all characters that a name may have.
PARAMETERS: dict[str, dict[str, Any] | None] = {
    "get": WEATHER,
    "get_now": None,
    "get_now_or_never": {"properties": {"b": {"type": "boolean"}}, "additionalProperties": False},
    "a.b-C_9": {
        "type": "object",
        "properties": {"n": {"enum": [None, [1], "<tool_call>", "]"]}},
        "required": ["n"],
    }
    | {"additionalProperties": False},
}
ANSWER = {
    "type": "object",
    "properties": {"x": {"enum": [1, "{"]}},
    "required": ["x"],
    "additionalProperties": False,
}


class Speaker:
    """Speaks at random whatever a grammar allows."""

    def __init__(self, *, has_special_markers: bool) -> None:
        backend: tokenizers.Tokenizer = byte_level()
        tokens = [AddedToken(marker, special=has_special_markers, normalized=False) for marker in MARKERS]
        if has_special_markers:
            backend.add_special_tokens(tokens)
        else:
            backend.add_tokens(tokens)
        eos = backend.token_to_id("<|im_end|>")
        assert eos is not None
        self.eos: int = eos
        self.vocab_size = backend.get_vocab_size()
        self.tokenizer = Tokenizer(backend, eos_token_ids=frozenset({self.eos}))
        self._compiler = GrammarCompiler(backend, vocab_size=self.vocab_size, eos_token_ids=[self.eos])

    def say(self, rule: OutputRule, seed: int, markers: Sequence[str]) -> list[str]:
        """The text of each token until the output is complete."""
        draw = random.Random(seed)
        matcher = self._compiler.matcher(rule.text)
        detokenizer: IncrementalDetokenizer = self.tokenizer.detokenizer(
            shown_special_tokens=frozenset(markers)
        )
        mask = np.zeros(-(-self.vocab_size // 32), dtype=np.int32)
        texts: list[str] = []
        for _ in range(4000):
            if matcher.is_complete:
                break
            matcher.fill_mask(mask)
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: self.vocab_size]
            allowed = np.flatnonzero(bits).tolist()
            assert allowed, "".join(texts)
            closing = self.tokenizer.special_token_id(THINK.closing)
            token = closing if closing in allowed and draw.random() < 0.2 else draw.choice(allowed)
            if token == self.eos:
                break
            matcher.accept(token)
            texts.append(detokenizer.push((token,)))
        else:
            raise AssertionError(f"no end: {''.join(texts)[-200:]}")
        return [*texts, detokenizer.finish()]


@pytest.fixture(scope="module", params=[True, False], ids=["special", "plain"])
def speaker(request: pytest.FixtureRequest) -> Speaker:
    return Speaker(has_special_markers=request.param)


def tools_body(**more: Any) -> dict[str, Any]:
    functions: list[dict[str, Any]] = [{"name": name} for name in PARAMETERS]
    for function, parameters in zip(functions, PARAMETERS.values(), strict=True):
        if parameters is not None:
            function["parameters"] = parameters
    return {"tools": [{"type": "function", "function": function} for function in functions], **more}


def read(parser: str, texts: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    schemas = {name: (schema or {}).get("properties", {}) for name, schema in PARAMETERS.items()}
    machine = CALL_FORMATS[parser].new_parser(schemas)()
    return message_of([*(piece for text in texts for piece in machine.push(text)), *machine.finish()])


def message_of(pieces: Sequence[MessagePiece]) -> tuple[str, list[tuple[str, str]]]:
    content = ""
    calls: list[tuple[str, str]] = []
    for piece in joined(pieces):
        match piece:
            case ContentPiece(text):
                content += text
            case CallPiece(_, name, arguments):
                calls.append((name or "", arguments))
    return content, calls


def check_calls(calls: Sequence[tuple[str, str]]) -> None:
    for name, arguments in calls:
        schema = PARAMETERS[name] or {"properties": {}, "additionalProperties": False}
        jsonschema_rs.validator_for({**schema, "type": "object"}).validate(json.loads(arguments))


@pytest.mark.parametrize("parser", CALL_FORMATS)
def test_every_forced_output_is_read_as_valid_calls(parser: str, speaker: Speaker) -> None:
    call_format = CALL_FORMATS[parser]
    seen = set()
    for seed in range(12):
        tools = read_tools(tools_body(tool_choice="required", parallel_tool_calls=seed % 2 == 0))
        assert tools is not None
        rule = calls_rule(tools, call_format.syntax, call_format.markers, speaker.tokenizer.special_token_id)
        content, calls = read(parser, speaker.say(rule, seed, call_format.markers))
        assert content == ""
        assert 1 <= len(calls) <= (MAX_FORCED_CALLS if seed % 2 == 0 else 1)
        check_calls(calls)
        seen |= {name for name, _ in calls}
    assert len(seen) > 1


@pytest.mark.parametrize("parser", [name for name in CALL_FORMATS if CALL_FORMATS[name].marked_syntax])
def test_an_output_that_may_be_calls_or_json_is_one_of_them(parser: str, speaker: Speaker) -> None:
    call_format = CALL_FORMATS[parser]
    assert call_format.marked_syntax is not None
    tools = read_tools(tools_body())
    assert tools is not None
    special_id = speaker.tokenizer.special_token_id
    calls = calls_rule(tools, call_format.marked_syntax, call_format.markers, special_id)
    rule = either(schema_rule(read_schema(Fields({"schema": ANSWER}), "schema")), calls)
    kinds = set()
    for seed in range(16):
        content, told = read(parser, speaker.say(rule, seed, call_format.markers))
        kinds.add(bool(told))
        if told:
            assert content == ""
            check_calls(told)
        else:
            jsonschema_rs.validator_for(ANSWER).validate(json.loads(content))
    assert kinds == {True, False}


@pytest.mark.parametrize("is_open", [False, True])
def test_thoughts_come_first_and_the_answer_keeps_its_form(is_open: bool, speaker: Speaker) -> None:
    schema = schema_rule(read_schema(Fields({"schema": ANSWER}), "schema"))
    rule = after_thinking(schema, THINK, speaker.tokenizer.special_token_id, is_open=is_open)
    num_with_thought = 0
    for seed in range(6):
        texts = speaker.say(rule, seed, (THINK.opening, THINK.closing))
        parser = ThinkParser(THINK, PlainText, is_open=is_open)
        pieces = joined([*(piece for text in texts for piece in parser.push(text)), *parser.finish()])
        content, _ = message_of(pieces)
        jsonschema_rs.validator_for(ANSWER).validate(json.loads(content))
        num_with_thought += any(isinstance(piece, ReasoningPiece) for piece in pieces)
    assert num_with_thought > 0, "no output thought before its answer, so nothing was shown"
