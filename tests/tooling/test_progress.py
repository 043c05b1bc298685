"""What a start shows: lines in a log, bars on a terminal, and a request to try at the end."""

from __future__ import annotations

import io

from forkpoint.configs.serving import ServerConfig
from forkpoint.server.cli_progress import Bars, Lines, startup_progress
from forkpoint.server.cli_serve import ready_text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_are_for_logs_and_bars_for_terminals() -> None:
    assert isinstance(startup_progress(io.StringIO()), Lines)
    bars = startup_progress(Terminal())
    bars.close()
    assert isinstance(bars, Bars)


def test_lines_come_at_the_begin_at_the_end_and_every_few_seconds() -> None:
    times = iter([0.0, 1.0, 4.9, 5.0, 6.0])
    stream = io.StringIO()
    lines = Lines(stream, clock=lambda: next(times))
    for done in (0, 10, 50, 60, 100):
        lines.show("loading", done, 100)
    assert stream.getvalue().splitlines() == [
        "forkpoint: loading: 0 %",
        "forkpoint: loading: 60 %",
        "forkpoint: loading: 100 %",
    ]


def test_a_stage_of_nothing_is_done() -> None:
    stream = io.StringIO()
    Lines(stream).show("warming up", 0, 0)
    assert stream.getvalue() == "forkpoint: warming up: 100 %\n"


def test_bars_show_every_stage_and_leave_with_close() -> None:
    stream = Terminal()
    bars = Bars(stream)
    bars.show("loading", 1, 2)
    bars.note("terms of use")
    bars.show("warming up", 1, 2)
    bars.close()
    bars.close()
    length = len(stream.getvalue())
    bars.show("loading", 2, 2)
    assert "loading" in stream.getvalue()
    assert "terms of use" in stream.getvalue()
    assert len(stream.getvalue()) == length


def test_the_ready_text_has_the_address_and_a_request() -> None:
    text = ready_text("http://127.0.0.1:8000", ServerConfig(served_model_names=("demo",)))
    assert "curl http://127.0.0.1:8000/v1/completions" in text
    assert '"model": "demo"' in text
    assert "Authorization" not in text
    assert "forkpoint chat" not in text


def test_the_ready_text_offers_a_chat_where_there_is_a_template() -> None:
    config = ServerConfig(served_model_names=("demo-chat",))
    assert "forkpoint chat --url http://[::1]:80\n" in ready_text("http://[::1]:80", config, can_chat=True)


def test_the_ready_text_never_shows_a_key() -> None:
    config = ServerConfig(served_model_names=("demo",), api_keys=("topsecret",))
    text = ready_text("http://127.0.0.1:8000", config)
    assert "Authorization: Bearer $API_KEY" in text
    assert "topsecret" not in text
