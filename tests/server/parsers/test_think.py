"""Reasoning between tags: split off at any cut, whether the output or the prompt opened it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.recorded_outputs import SCHEMAS

from forkpoint.server.message_pieces import CallPiece, ContentPiece, MessagePiece, ReasoningPiece, joined
from forkpoint.server.parsers.formats import CALL_FORMATS
from forkpoint.server.parsers.machine import PlainText
from forkpoint.server.parsers.think import THINK, ThinkParser


def parse(texts: list[str], *, is_open: bool = False) -> tuple[MessagePiece, ...]:
    parser = ThinkParser(THINK, PlainText, is_open=is_open)
    pieces = [piece for text in texts for piece in parser.push(text)]
    return joined([*pieces, *parser.finish()])


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("<think>\nIt is 4.\n</think>\n\nFour.", False, "It is 4.", "Four."),
        ("\n<think>a</think>b", False, "a", "b"),
        ("It is 4.\n</think>\n\nFour.", True, "It is 4.", "Four."),
        ("<think>\nIt is 4.\n</think>Four.", True, "It is 4.", "Four."),
        ("<think>\n\n</think>\n\nFour.", False, "", "Four."),
        ("<think>cut off", False, "cut off", ""),
        ("cut off </thi", True, "cut off </thi", ""),
        ("Four. <think>no</think>", False, "", "Four. <think>no</think>"),
        (" <thin", False, "", " <thin"),
        ("<think>a <think> b</think>c</think>", False, "a <think> b", "c</think>"),
        ("\n", False, "", "\n"),
    ],
)
def test_reasoning_is_split_off_at_every_cut(text: str, is_open: bool, reasoning: str, content: str) -> None:
    expected: list[MessagePiece] = [ReasoningPiece(reasoning)] if reasoning else []
    expected += [ContentPiece(content)] if content else []
    assert parse(list(text), is_open=is_open) == tuple(expected)
    for cut in range(len(text) + 1):
        assert parse([text[:cut], text[cut:]], is_open=is_open) == tuple(expected)


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from(["<think>", "</think>", "<th", "think>", "a", " ", "\n", "<"]), max_size=12
    ),
    is_open=st.booleans(),
    data=st.data(),
)
def test_the_cuts_make_no_difference_and_nothing_but_space_and_tags_is_lost(
    parts: list[str], is_open: bool, data: st.DataObject
) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=5)))
    whole = parse([text], is_open=is_open)
    assert parse([text[i:j] for i, j in itertools.pairwise([0, *cuts, len(text)])], is_open=is_open) == whole
    told = "".join(piece.text for piece in whole if not isinstance(piece, CallPiece))
    assert told.count("a") == text.count("a")


def test_is_reasoning_tells_of_what_was_pushed_last() -> None:
    parser = ThinkParser(THINK, PlainText, is_open=False)
    states = []
    for text in ("<think>", "hm", "</think>", "yes"):
        parser.push(text)
        states.append(parser.is_reasoning)
    assert states == [True, True, False, False]
    assert ThinkParser(THINK, PlainText, is_open=True).is_reasoning


def test_calls_after_the_reasoning_are_read_and_those_in_it_are_not() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    parser = ThinkParser(THINK, CALL_FORMATS["hermes"].new_parser(SCHEMAS), is_open=False)
    pieces = joined([*parser.push(f"<think>{call}</think>\n\n{call}"), *parser.finish()])
    assert pieces == (ReasoningPiece(call), CallPiece(0, "now", "{}"))
