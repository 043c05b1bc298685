"""Parsers of calls: recorded outputs, any way the text is cut, text that only looks like a call, and time."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.growth import grows_linearly
from support.recorded_outputs import RECORDED, SCHEMAS, Recorded

from forkpoint.server.message_pieces import CallPiece, ContentPiece, MessagePiece, joined
from forkpoint.server.parsers.formats import CALL_FORMATS

# What makes calls, and half calls, likely.
_FRAGMENTS = st.sampled_from(
    [*'{}[]"\\:,;()=<>\n `', "```json\n", "```tool_code\n", "```", "<tool_call>", "</tool_call>", "[ARGS]"]
    + ["[TOOL_CALLS]", "<|python_tag|>", "<start_function_call>", "<end_function_call>", "<escape>", "call:"]
    + ['{"name": "get_weather", "arguments": {', '"name": "now"', '"arguments": {}', "get_weather(city="]
    + ["now()", "<function=now>", "<parameter=city>", "</function>", "true", "12", '"city": "x"}}', "print("]
    + ["\\u00e", "some", "words"]
)
_TEXTS = st.lists(_FRAGMENTS, max_size=24).map("".join)


def parse(parser: str, texts: Sequence[str]) -> tuple[MessagePiece, ...]:
    machine = CALL_FORMATS[parser].new_parser(SCHEMAS)()
    pieces = [piece for text in texts for piece in machine.push(text)]
    return joined([*pieces, *machine.finish()])


def content_of(pieces: Sequence[MessagePiece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, ContentPiece))


def calls_of(pieces: Sequence[MessagePiece]) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if isinstance(piece, CallPiece):
            if piece.name is not None:
                assert piece.call_index == len(calls)
                calls.append((piece.name, ""))
            assert piece.call_index == len(calls) - 1
            name, arguments = calls[-1]
            calls[-1] = (name, arguments + piece.arguments)
    return calls


@pytest.mark.parametrize(
    "recorded", RECORDED, ids=lambda recorded: f"{recorded.parser}-{recorded.text[:30]!r}"
)
def test_recorded_output_is_read_at_every_cut(recorded: Recorded) -> None:
    for cuts in itertools.chain(
        ([recorded.text], list(recorded.text)),
        ([recorded.text[:cut], recorded.text[cut:]] for cut in range(len(recorded.text))),
    ):
        pieces = parse(recorded.parser, cuts)
        calls = tuple((name, json.loads(arguments)) for name, arguments in calls_of(pieces))
        assert (content_of(pieces), calls) == (recorded.content, recorded.calls)


@pytest.mark.parametrize("parser", CALL_FORMATS)
@settings(max_examples=150, deadline=None)
@given(text=_TEXTS, data=st.data())
def test_the_cuts_make_no_difference_and_text_without_calls_is_content(
    parser: str, text: str, data: st.DataObject
) -> None:
    whole = parse(parser, [text])
    assert parse(parser, list(text)) == whole
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=5)))
    assert parse(parser, [text[i:j] for i, j in itertools.pairwise([0, *cuts, len(text)])]) == whole
    if not calls_of(whole):
        assert content_of(whole) == text


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder", "mistral", "mistral_v11", "functiongemma"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_text_between_calls_is_content_and_all_calls_come_in_order(parser: str, data: st.DataObject) -> None:
    outputs = [each for each in RECORDED if each.parser == parser and each.calls]
    words = st.sampled_from(["Well", "a < b", "it's", "[1]", "x_y"])
    parts = data.draw(st.lists(st.one_of(st.sampled_from(outputs), words), max_size=6))
    pieces = parse(parser, "".join(part if isinstance(part, str) else part.text for part in parts))
    assert content_of(pieces) == "".join(part if isinstance(part, str) else part.content for part in parts)
    calls = [(name, json.loads(arguments)) for name, arguments in calls_of(pieces)]
    assert calls == [call for part in parts if not isinstance(part, str) for call in part.calls]


@pytest.mark.parametrize("parser", CALL_FORMATS)
@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="abc xyz.,!?\n\t日", max_size=60))
def test_plain_text_is_content_as_it_is(parser: str, text: str) -> None:
    assert parse(parser, list(text)) == ((ContentPiece(text),) if text else ())


@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "mistral_v11", "json", "gemma"])
def test_arguments_come_as_they_are_written_where_the_name_is_known(parser: str) -> None:
    syntax = CALL_FORMATS[parser].syntax
    machine = CALL_FORMATS[parser].new_parser(SCHEMAS)()
    machine.push(syntax.before + syntax.start_of("get_weather"))
    assert joined(machine.push('{"city": "Par'))[-1].arguments.endswith('{"city": "Par')  # type: ignore[union-attr]
    assert machine.push('is"') == [CallPiece(0, None, "is"), CallPiece(0, None, '"')]


@pytest.mark.parametrize("parser", CALL_FORMATS)
def test_what_a_forced_call_looks_like_is_read_as_calls(parser: str) -> None:
    syntax = CALL_FORMATS[parser].syntax
    call = syntax.start_of("get_weather") + '{"city": "Paris"}' + syntax.closing
    pieces = parse(parser, [syntax.before + call + syntax.between + call + syntax.after])
    assert calls_of(pieces) == [("get_weather", '{"city": "Paris"}')] * 2
    assert content_of(pieces) == ""


def test_calls_beyond_the_first_are_dropped_where_only_one_is_wanted() -> None:
    machine = CALL_FORMATS["mistral_v11"].new_parser(SCHEMAS, max_calls=1)()
    pieces = machine.push('[TOOL_CALLS]now[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{"b": 2}') + machine.finish()
    assert calls_of(joined(pieces)) == [("now", '{"a": 1}')]


_NASTY = {
    "hermes": ("<tool_call>", '<tool_call>{"name": "', "<tool_call>{", '<tool_call>{"name": "a", "id": [1, '),
    "qwen3_coder": ("<tool_call>", "<tool_call><function=a>" + "<parameter=b>", "<tool_call> "),
    "llama3_json": ('{"name": "now", "parameters": {"a": [', "<|python_tag|>", "; "),
    "mistral": ("[TOOL_CALLS]", "[TOOL_CALLS][", "[TOOL_CALLS]a"),
    "gemma": ("```", "```json\n", "```tool_code\nnow(a=", "[now(a=[", "now(", "now()\n"),
    "functiongemma": ("<start_function_call>", "<start_function_call>call:a{b:<escape>", "<escape>"),
    "json": ("```json\n{", "```json {}", "{" * 3, "[{"),
}  # fmt: skip


@pytest.mark.parametrize(("parser", "text"), [(parser, text) for parser in _NASTY for text in _NASTY[parser]])
def test_the_time_is_linear_in_the_text(parser: str, text: str) -> None:
    def run(num_chars: int) -> None:
        whole = (text * (num_chars // len(text) + 1))[:num_chars]
        parse(parser, [whole[i : i + 4] for i in range(0, num_chars, 4)])

    assert grows_linearly(run, 10_000)


@pytest.mark.parametrize("parser", [name for name in CALL_FORMATS if CALL_FORMATS[name].marked_syntax])
def test_calls_where_other_json_may_be_the_answer_are_read_too(parser: str) -> None:
    syntax = CALL_FORMATS[parser].marked_syntax
    assert syntax is not None
    call = syntax.start_of("get_weather") + '{"city": "Paris"}' + syntax.closing
    pieces = parse(parser, list(syntax.before + call + syntax.between + call + syntax.after))
    assert calls_of(pieces) == [("get_weather", '{"city": "Paris"}')] * 2
    assert content_of(pieces) == ""


@pytest.mark.parametrize(
    "recorded", [each for each in RECORDED if each.calls], ids=lambda each: each.text[:30]
)
def test_calls_of_functions_that_must_not_be_called_are_content(recorded: Recorded) -> None:
    machine = CALL_FORMATS[recorded.parser].new_parser({"another": {}}, is_closed=True)()
    assert joined(machine.push(recorded.text) + machine.finish()) == (ContentPiece(recorded.text),)
