"""gpt-oss' channels: recorded outputs at every cut, outputs that leave the format, unseen markers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.growth import grows_linearly
from support.recorded_outputs import SCHEMAS

from forkpoint.server.message_pieces import CallPiece, ContentPiece, MessagePiece, ReasoningPiece, joined
from forkpoint.server.parsers.formats import CALL_FORMATS, detect_call_format, detect_reasoning
from forkpoint.server.parsers.harmony import MARKERS

HARMONY = CALL_FORMATS["harmony"]


@dataclass(frozen=True)
class Told:
    """What an output says. calls: (name, arguments as written)."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()


def told(pieces: Sequence[MessagePiece]) -> Told:
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if isinstance(piece, CallPiece):
            if piece.name is not None:
                assert piece.call_index == len(calls)
                calls.append((piece.name, ""))
            calls[piece.call_index] = (
                calls[piece.call_index][0],
                calls[piece.call_index][1] + piece.arguments,
            )
    return Told(
        "".join(piece.text for piece in pieces if isinstance(piece, ReasoningPiece)),
        "".join(piece.text for piece in pieces if isinstance(piece, ContentPiece)),
        tuple(calls),
    )


def parse(texts: Sequence[str]) -> tuple[MessagePiece, ...]:
    parser = HARMONY.new_parser(SCHEMAS)()
    pieces = [piece for text in texts for piece in parser.push(text)]
    return joined([*pieces, *parser.finish()])


_ANALYSIS = "<|channel|>analysis<|message|>"
_FINAL = "<|channel|>final<|message|>"
_NEXT = "<|end|><|start|>assistant"
_PARIS = '{"city": "Paris"}'
_TO_WEATHER = "<|channel|>commentary to=functions.get_weather"
_WEATHER = (("get_weather", _PARIS),)

# From the description of the format, the tests of OpenAI's library, and reports of what models write.
OUTPUTS = {
    f"{_ANALYSIS}2 + 2.{_NEXT}{_FINAL}2 + 2 = 4.<|return|>": Told("2 + 2.", "2 + 2 = 4."),
    f"{_FINAL}4": Told(content="4"),
    f"<|start|>assistant{_FINAL}4": Told(content="4"),
    f"{_ANALYSIS}Use the tool.{_NEXT}{_TO_WEATHER} <|constrain|>json<|message|>{_PARIS}<|call|>": Told(
        "Use the tool.", calls=_WEATHER
    ),
    # The marker right behind the name.
    f"{_TO_WEATHER}<|constrain|>json<|message|>{_PARIS}<|call|>": Told(calls=_WEATHER),
    # The recipient before the channel, in the role; in the first header and in a later one.
    f" to=functions.get_weather<|channel|>commentary json<|message|>{_PARIS}<|call|>": Told(calls=_WEATHER),
    f"{_ANALYSIS}a{_NEXT} to=functions.get_weather<|channel|>commentary json<|message|>{_PARIS}": Told(
        "a", calls=_WEATHER
    ),
    # On the channel of the reasoning; without a content type; without the namespace.
    f"<|channel|>analysis to=functions.get_weather code<|message|>{_PARIS}<|call|>": Told(calls=_WEATHER),
    f"{_TO_WEATHER}<|message|>{_PARIS}": Told(calls=_WEATHER),
    f"<|channel|>commentary to=get_weather <|constrain|>json<|message|>{_PARIS}": Told(calls=_WEATHER),
    # A preamble, which is for the user, and two calls.
    f"<|channel|>commentary<|message|>**Plan**: look.{_NEXT}<|channel|>commentary to=functions.get_weather "
    f"<|constrain|>json<|message|>{_PARIS}<|call|><|start|>assistant<|channel|>commentary to=functions.now "
    "<|constrain|>json<|message|>{}<|call|>": Told(
        content="**Plan**: look.", calls=(("get_weather", _PARIS), ("now", "{}"))
    ),
    f"<|channel|>commentary<|message|>Wait.{_NEXT}{_FINAL}Done.": Told(content="Wait.\nDone."),
    f"{_ANALYSIS}a{_NEXT}{_ANALYSIS}b{_NEXT}{_FINAL}c": Told("a\nb", "c"),
    '<|channel|>final <|constrain|>json<|message|>{"result":true}<|return|>': Told(content='{"result":true}'),
    # A tool of the model's own, which nobody offered.
    "<|channel|>analysis to=python code<|message|>print(1)<|end|>": Told("print(1)"),
    "<|channel|>commentary to=browser.search<|message|>{}": Told(content="{}"),
    # Headers that miss something, as OpenAI's library reads them.
    f"I must refuse{_NEXT}{_ANALYSIS}We must refuse{_NEXT}{_FINAL}I'm sorry.": Told(
        "We must refuse", "I must refuse\nI'm sorry."
    ),
    f"<|channel|>analysis I must refuse{_NEXT}{_FINAL}Sorry.": Told("I must refuse", "Sorry."),
    f"Let's call.{_NEXT} to=functions.get_weather<|channel|>commentary json<|message|>{_PARIS}": Told(
        content="Let's call.", calls=_WEATHER
    ),
    "<|message|>plain": Told(content="plain"),
    "<|channel|>novel<|message|>plain": Told(content="plain"),
    f"{_ANALYSIS}a<|channel|>final<|message|>b": Told("a", "b"),
    f"{_ANALYSIS}a<|end|>\n<|start|>assistant\n{_FINAL}b<|end|>\n": Told("a", "b"),
    f"{_FINAL}a<|message|>b<|constrain|>c<|end|><|end|><|return|>": Told(content="abc"),
    'to=functions.now json{"a": 1}': Told(content='to=functions.now json{"a": 1}'),
    "<|channel|>commentary to=functions.now json{}<|call|>": Told(calls=(("now", "{}"),)),
    # Arguments: none, some that JSON does not know, no object.
    "<|channel|>commentary to=functions.now<|message|><|call|>": Told(calls=(("now", "{}"),)),
    '<|channel|>commentary to=functions.now<|message|>{"a": "b\nc"} \n<|call|>': Told(
        calls=(("now", '{"a": "b\\nc"}'),)
    ),
    "<|channel|>commentary to=functions.now<|message|>print(1)": Told(calls=(("now", "print(1)"),)),
    # Cut off.
    "": Told(),
    "<|channel|>": Told(),
    "<|channel|>anal": Told(),
    "<|channel|>commentary t": Told(),
    "<|channel|>commentary to=func": Told(),
    "<|channel|>commentary to=functions.get_wea": Told(),
    "<|channel|>commentary to=functions.get_weather <|constrain|>js": Told(),
    f"{_ANALYSIS}thinking about": Told("thinking about"),
    '<|channel|>commentary to=functions.get_weather<|message|>{"city": "Par': Told(
        calls=(("get_weather", '{"city": "Par'),)
    ),
}


@pytest.mark.parametrize("text", OUTPUTS)
def test_an_output_is_read_at_every_cut(text: str) -> None:
    for cuts in itertools.chain(([text], list(text)), ([text[:cut], text[cut:]] for cut in range(len(text)))):
        assert told(parse(cuts)) == OUTPUTS[text]


_FRAGMENTS = st.sampled_from(
    [*MARKERS, *MARKERS, "assistant", "analysis", "commentary", "final", " to=", "functions.", "get_weather"]
    + ["python", "json", '{"city": "', '"}', "{", "}", "<", "|", "<|", "|>", " ", "\n", "word", "<|e"]
)


@settings(max_examples=400, deadline=None)
@given(text=st.lists(_FRAGMENTS, max_size=24).map("".join), data=st.data())
def test_the_cuts_make_no_difference_and_no_marker_is_told(text: str, data: st.DataObject) -> None:
    whole = parse([text])
    assert parse(list(text)) == whole
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=5)))
    assert parse([text[i:j] for i, j in itertools.pairwise([0, *cuts, len(text)])]) == whole
    said = told(whole)
    for part in (said.reasoning, said.content, *itertools.chain(*said.calls)):
        assert not any(marker in part for marker in MARKERS)


_WORDS = st.lists(
    st.sampled_from(["Well", "a < b", "it's", "[1]", "é🚂", "to=x", "|>"]), min_size=1, max_size=5
).map(" ".join)


@settings(max_examples=150, deadline=None)
@given(
    messages=st.lists(
        st.tuples(st.sampled_from(["analysis", "final", "commentary", "call"]), _WORDS), max_size=6
    )
)
def test_messages_of_any_number_and_order_are_told_whole(messages: list[tuple[str, str]]) -> None:
    texts = []
    for channel, words in messages:
        if channel == "call":
            header = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>"
            texts.append(f'{header}{{"a": "{words}"}}<|call|>')
        else:
            texts.append(f"<|channel|>{channel}<|message|>{words}<|end|>")
    said = told(parse(["<|start|>assistant".join(texts)]))
    assert said.reasoning == "\n".join(words for channel, words in messages if channel == "analysis")
    contents = [words for channel, words in messages if channel in ("final", "commentary")]
    if not said.calls:
        assert said.content == "\n".join(contents)
    assert said.content.replace("\n", "") == "".join(contents)
    assert said.calls == tuple(
        ("now", f'{{"a": "{words}"}}') for channel, words in messages if channel == "call"
    )


def test_all_is_told_as_it_comes() -> None:
    parser = HARMONY.new_parser(SCHEMAS)()
    assert parser.push(f"{_ANALYSIS}thi") == [ReasoningPiece("thi")]
    assert parser.push("nk") == [ReasoningPiece("nk")]
    parser.push(f"{_NEXT}<|channel|>commentary to=functions.get_weather <|constrain|>json")
    assert parser.push("<|message|>") == [CallPiece(0, "get_weather", "")]
    assert joined(parser.push('{"city": "Par')) == (CallPiece(0, None, '{"city": "Par'),)
    assert parser.push("is") == [CallPiece(0, None, "is")]
    parser.push(f'"}}<|call|><|start|>assistant{_FINAL}')
    assert parser.push("Do") == [ContentPiece("Do")]


def test_is_reasoning_holds_for_the_text_of_the_analysis_alone() -> None:
    parser = HARMONY.new_parser(SCHEMAS)()
    states = []
    for text in (
        "<|channel|>",
        "analysis",
        "<|message|>",
        "hm",
        "<|end|>",
        "<|start|>",
        f"assistant{_FINAL}",
        "4",
    ):
        parser.push(text)
        states.append(parser.is_reasoning)
    assert states == [False, False, True, True, False, False, False, False]


def test_a_function_that_must_not_be_called_is_none_and_its_message_is_content() -> None:
    text = f"{_TO_WEATHER}<|message|>{_PARIS}<|call|>"
    for names in ((), ("now",)):
        parser = HARMONY.new_parser({name: {} for name in names}, is_closed=True)()
        assert joined([*parser.push(text), *parser.finish()]) == (ContentPiece(_PARIS),)


def test_reasoning_is_content_where_it_is_not_looked_for() -> None:
    parser = HARMONY.new_parser(SCHEMAS, tells_reasoning=False)()
    pieces = [*parser.push(f"{_ANALYSIS}a"), *parser.push(f"b{_NEXT}{_FINAL}c"), *parser.finish()]
    assert joined(pieces) == (ContentPiece("ab\nc"),)
    assert not parser.is_reasoning


@pytest.mark.parametrize(
    "text",
    [*MARKERS, "<", _ANALYSIS, "<|channel|>", " to=", "<|end|> ", f"{_FINAL}a<|end|>"]
    + ['<|channel|>commentary to=functions.now<|message|>{"a": ['],
)  # fmt: skip
def test_the_time_is_linear_in_the_text(text: str) -> None:
    def run(num_chars: int) -> None:
        whole = (text * (num_chars // len(text) + 1))[:num_chars]
        parse([whole[i : i + 4] for i in range(0, num_chars, 4)])

    assert grows_linearly(run, 10_000)


def test_a_template_of_channels_is_recognised() -> None:
    template = "{{ '<|start|>assistant<|channel|>final<|message|>' + message.content }} {# <think> #}"
    assert (detect_call_format(template), detect_reasoning(template)) == ("harmony", "harmony")
    assert detect_reasoning("<|channel>thought") is None
