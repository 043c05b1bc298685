"""Stop strings: whatever the split into pieces, the text is cut as `index` over all of it would cut it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forkpoint.server.stop import StopMatcher

# Few letters, so that stops overlap each other and themselves; an emoji and a combining mark among them.
TEXTS = st.text(alphabet="ab\n🚂\u0301", max_size=40)
STOPS = st.lists(st.text(alphabet="ab\n🚂\u0301", min_size=1, max_size=6), max_size=4).map(tuple)


def run(
    stops: tuple[str, ...], pieces: list[str], *, include_stop: bool = False
) -> tuple[list[str], str | None]:
    """What was emitted, piece by piece and at the end, and the stop that matched."""
    matcher = StopMatcher(stops, include_stop=include_stop)
    emitted = []
    for piece in pieces:
        text, matched = matcher.push(piece)
        emitted.append(text)
        if matched is not None:
            return emitted, matched
    emitted.append(matcher.finish())
    return emitted, matcher.matched


def expected(stops: tuple[str, ...], text: str) -> tuple[str, str | None]:
    """By definition: the earliest start, and of stops that start there the shortest."""
    found = [(text.index(stop), len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    start, _, stop = min(found)
    return text[:start], stop


@st.composite
def split_texts(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = draw(TEXTS)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    edges = [0, *cuts, len(text)]
    return text, [text[start:end] for start, end in zip(edges, edges[1:], strict=False)]


@given(STOPS, split_texts())
def test_any_split_gives_the_text_before_the_earliest_stop(
    stops: tuple[str, ...], split: tuple[str, list[str]]
) -> None:
    text, pieces = split
    emitted, matched = run(stops, pieces)
    assert ("".join(emitted), matched) == expected(stops, text)


@given(STOPS, split_texts())
def test_include_stop_ends_the_text_with_the_stop(
    stops: tuple[str, ...], split: tuple[str, list[str]]
) -> None:
    text, pieces = split
    emitted, matched = run(stops, pieces, include_stop=True)
    before, stop = expected(stops, text)
    assert ("".join(emitted), matched) == (before + (stop or ""), stop)


@given(STOPS, split_texts())
def test_nothing_is_held_back_without_need(stops: tuple[str, ...], split: tuple[str, list[str]]) -> None:
    """After each push the held text is the longest suffix that a stop may begin with, or none."""
    text, pieces = split
    if expected(stops, text)[1] is not None:
        return
    matcher, pushed, emitted = StopMatcher(stops), "", ""
    for piece in pieces:
        pushed += piece
        emitted += matcher.push(piece)[0]
        held = [
            n
            for n in range(len(pushed) + 1)
            if any(stop.startswith(pushed[len(pushed) - n :]) for stop in stops)
        ]
        assert pushed[len(emitted) :] == pushed[len(pushed) - max(held, default=0) :]


def test_a_prefix_of_a_stop_is_held_until_it_fails() -> None:
    matcher = StopMatcher(("</end>",))
    assert matcher.push("one </e") == ("one ", None)
    assert matcher.push("x") == ("</ex", None)
    assert matcher.push("</end") == ("", None)
    assert matcher.finish() == "</end"
    assert matcher.matched is None


def test_an_earlier_start_wins_over_an_earlier_end() -> None:
    assert run(("abcd", "bc"), ["abc", "d"]) == (["", ""], "abcd")
    assert run(("abcd", "bc"), ["abc", "x"]) == (["", "a"], "bc")


def test_a_stop_inside_an_unfinished_longer_one_is_found_when_the_text_ends() -> None:
    assert run(("abcd", "bc"), ["abc"]) == (["", "a"], "bc")


def test_of_two_stops_at_one_place_the_shorter_is_reported() -> None:
    assert run(("\n\n", "\n"), ["a\n\nb"]) == (["a"], "\n")


def test_a_stop_across_pieces_is_cut_exactly() -> None:
    assert run(("dog, cat",), ["a do", "g, c", "at, cow"]) == (["a ", "", ""], "dog, cat")


def test_text_after_a_match_is_dropped() -> None:
    matcher = StopMatcher(("x",))
    assert matcher.push("axb") == ("a", "x")
    assert matcher.push("more") == ("", "x")
    assert matcher.finish() == ""


def test_without_stops_text_passes_at_once() -> None:
    assert run((), ["a", "b"]) == (["a", "b", ""], None)


def test_repetitive_stops_take_linear_time() -> None:
    """Counted, not timed: one automaton step looks at most at two characters for each character of text."""

    class Counted(str):
        comparisons = 0

        def __ne__(self, other: object) -> bool:
            Counted.comparisons += 1
            return str.__ne__(self, other)

        __hash__ = str.__hash__

    length = 3_000
    matcher = StopMatcher(("a" * 1_000 + "b",))
    for _ in range(length):
        matcher.push("")
        for search in matcher._searches:
            search.step(Counted("a"))
    assert 0 < Counted.comparisons <= 2 * length
