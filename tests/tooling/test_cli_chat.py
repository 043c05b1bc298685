"""`forkpoint chat` against the real HTTP server: what it sends, shows and says when something is wrong."""

from __future__ import annotations

import http.server
import io
import os
import pty
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from support.fake_engine import FakeEngine, says
from support.http_server import MODEL, World, serving
from support.text_doubles import EOS

from forkpoint.configs.chat_settings import ChatSettings
from forkpoint.configs.errors import ConfigError, RemoteError
from forkpoint.scheduler.client import EngineState
from forkpoint.server.chat_client import Account, ChatClient
from forkpoint.server.cli import run
from forkpoint.server.cli_chat import chat_with_server
from forkpoint.server.cli_chat_session import ChatSession
from forkpoint.server.cli_chat_terminal import Writer
from forkpoint.server.cli_chat_text import account_line, harmless

FORKPOINT = str(Path(sys.executable).with_name("forkpoint"))


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("FORKPOINT_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _quiet_server() -> Iterator[None]:
    """The server runs in this very process, and its log would stand between the answers."""
    with structlog.testing.capture_logs():
        yield


class Person:
    """Somebody at a terminal who types these lines; a function among them is called at its turn."""

    is_person = True

    def __init__(self, *lines: str | Callable[[], object]) -> None:
        self._lines = iter(lines)

    def read_line(self, prompt: str) -> str:
        for line in self._lines:
            if isinstance(line, str):
                return line
            line()
        raise EOFError


class Screen(io.StringIO):
    """A terminal; Ctrl-C is pressed once when `until` has been shown."""

    encoding = "utf-8"

    def __init__(self, *, interrupt_after: str | None = None) -> None:
        super().__init__()
        self._interrupt_after = interrupt_after

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        count = super().write(text)
        if self._interrupt_after is not None and self._interrupt_after in self.getvalue():
            self._interrupt_after = None
            raise KeyboardInterrupt
        return count


def chat(
    world: World, *lines: str | Callable[[], object], screen: Screen | None = None, **session: Any
) -> tuple[str, str]:
    """A chat of a person; returns what was answered and what was noted."""
    screen, notes = screen or Screen(), io.StringIO()
    client = ChatClient(world.url)
    settings: dict[str, Any] = {"model": MODEL, "options": {}, **session}
    ChatSession(client, Person(*lines), Writer(screen, notes), **settings).run()
    client.close()
    return screen.getvalue(), notes.getvalue()


def sent(world: World) -> list[list[tuple[str, str]]]:
    """The messages of each request, as the template got them; probes of other forks are left out."""
    return [list(dict.fromkeys(prompt)) for prompt in map(_parsed, world.engine.submits)]


def _parsed(submit: Any) -> list[tuple[str, str]]:
    text = bytes(int(token) for token in submit.token_ids if token < 256).decode()
    parts = [part.partition(":") for part in text.removesuffix("assistant:").split("|") if part]
    return [(role, content) for role, _, content in parts]


def piped(world: World, monkeypatch: pytest.MonkeyPatch, text: str, *flags: str) -> int:
    """`forkpoint chat` with `text` on its standard input."""
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return run(["chat", "--url", world.url, *flags])


# ---- a chat


def test_a_pipe_gets_answers_alone_and_each_line_goes_on_with_the_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(FakeEngine(reply=says("yes", EOS), cached_tokens=5)) as world:
        assert piped(world, monkeypatch, "one\n\ntwo\n", "--system", "be kind", "--seed", "7") == 0
        assert sent(world) == [
            [("system", "be kind"), ("user", "one")],
            [("system", "be kind"), ("user", "one"), ("assistant", "yes"), ("user", "two")],
        ]
        num_prompt_tokens = len(world.engine.submits[0].token_ids)
        assert world.engine.submits[0].params.seed == 7
    out, err = capsys.readouterr()
    assert out == "yes\nyes\n"
    line = err.splitlines()[0]
    computed = num_prompt_tokens - 5
    assert line.startswith(f"prompt {num_prompt_tokens} tokens: 5 cached, 0 rebuilt, {computed} computed; ")
    assert "first token " in line and "4 tokens; " in line and line.endswith(" tokens/s")


def test_settings_come_from_the_environment_and_the_command_line_wins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(FakeEngine(reply=says("yes, of course"))) as world:
        monkeypatch.setenv("FORKPOINT_MAX_TOKENS", "3")
        monkeypatch.setenv("FORKPOINT_SYSTEM", "from outside")
        assert piped(world, monkeypatch, "one\n", "--system", "mine") == 0
        assert sent(world) == [[("system", "mine"), ("user", "one")]]
    out, err = capsys.readouterr()
    assert out == "yes\n"
    assert "cut off at the token limit" in err


def test_commands_change_the_chat() -> None:
    with serving(FakeEngine(reply=says("ok", EOS))) as world:
        _, notes = chat(
            world,
            "a",
            "/system new",
            "b",
            "/undo",
            "c",
            "/retry",
            "/reset",
            "d",
            "/system -",
            "e",
            "/exit",
            "f",
        )
        a, d = [("user", "a"), ("assistant", "ok")], [("user", "d"), ("assistant", "ok")]
        assert sent(world) == [
            [("user", "a")],
            [("system", "new"), *a, ("user", "b")],
            [("system", "new"), *a, ("user", "c")],
            [("system", "new"), *a, ("user", "c")],
            [("system", "new"), ("user", "d")],
            [*d, ("user", "e")],
        ]
    assert "system prompt set" in notes


@pytest.mark.parametrize("command", ["/exit", "/quit", "/bye"])
def test_every_way_out_is_one(command: str) -> None:
    with serving(FakeEngine(reply=says("ok", EOS))) as world:
        chat(world, command, "not sent")
        assert world.engine.submits == []


def test_what_only_looks_like_a_command_is_a_message() -> None:
    with serving(FakeEngine(reply=says("ok", EOS))) as world:
        _, notes = chat(world, "/etc/hosts", "/ 2", " /help", "/unheard of")
        assert [prompt[-1] for prompt in sent(world)] == [
            ("user", "/etc/hosts"),
            ("user", "/ 2"),
            ("user", " /help"),
        ]
    assert "no command /unheard" in notes


def test_commands_with_nothing_to_work_on_say_so() -> None:
    with serving() as world:
        _, notes = chat(world, "/retry", "/undo", "/system", "/help")
        assert world.engine.submits == []
    assert "no message to answer again" in notes
    assert "nothing to undo" in notes
    assert "no system prompt" in notes
    assert "/reset" in notes


def test_three_quotes_hold_several_lines_together() -> None:
    with serving(FakeEngine(reply=says("ok", EOS))) as world:
        chat(world, '"""one', "", 'two"""', '"""three"""', '"""', "four", '"""')
        assert [prompt[-1][1] for prompt in sent(world)] == ["one\n\ntwo", "three", "\nfour\n"]


# ---- Ctrl-C


def test_ctrl_c_stops_the_answer_frees_the_slot_and_keeps_what_there_is() -> None:
    with serving(FakeEngine(reply=says("abc"))) as world:
        screen = Screen(interrupt_after="abc")

        def freed() -> None:
            world.engine.until(lambda: world.engine.aborts and world.engine.num_running == 0)
            world.engine.reply = says("ok", EOS)

        _, notes = chat(world, "one", freed, "two", screen=screen)
        assert screen.getvalue().endswith("ok\n")
        first, second = sent(world)
        assert second[0] == first[0] == ("user", "one")
        assert second[1][0] == "assistant" and second[1][1].startswith("abc")
    assert "stopped" in notes


def test_ctrl_c_reaches_a_chat_on_a_terminal() -> None:
    """The whole program on a terminal of its own, as a person has it; the signal comes from the key."""
    with serving(FakeEngine(reply=says("Once upon"))) as world, on_terminal(world.url) as (keys, shown):
        shown(">>>")
        keys("tell me a tale\r")
        shown("Once upon")
        keys("\x03")
        shown("stopped")
        world.engine.until(lambda: world.engine.aborts and world.engine.num_running == 0)
        world.engine.reply = says("Good bye", EOS)
        keys("and now?\r")
        shown("Good bye")
        shown("tokens/s")
        keys("/exit\r")


class on_terminal:
    """`forkpoint chat --url URL` on a pseudo terminal: gives keys(text) and shown(text), which waits for it.

    At the end the program must have ended by itself, with status 0.
    """

    def __init__(self, url: str) -> None:
        self._master, slave = pty.openpty()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FORKPOINT_")}
        self._process = subprocess.Popen(
            [FORKPOINT, "chat", "--url", url],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            # The terminal must be the controlling one, or its Ctrl-C would be a signal for nobody.
            preexec_fn=lambda: _take_terminal(0),
            env={**environment, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"},
        )
        os.close(slave)
        self._shown = ""

    def __enter__(self) -> tuple[Callable[[str], object], Callable[[str], None]]:
        return lambda text: os.write(self._master, text.encode()), self._wait_for

    def __exit__(self, *error: object) -> None:
        try:
            if error[0] is None:
                assert self._process.wait(20) == 0, self._shown
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            os.close(self._master)

    def _wait_for(self, text: str) -> None:
        """Read until `text` was shown; what came before it is forgotten."""
        deadline = time.monotonic() + 20
        while text not in self._shown:
            ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{text!r} is not shown: {self._shown!r}"
            self._shown += os.read(self._master, 65536).decode(errors="replace")
        self._shown = self._shown.partition(text)[2]


def _take_terminal(descriptor: int) -> None:
    import fcntl
    import termios

    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)


# ---- what is shown


def test_an_answer_cannot_control_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nasty = "\x1b]0;title\x07\x1b[2Jred\r\x9b31m\tü\n"
    with serving(FakeEngine(reply=says(nasty, EOS))) as world:
        assert piped(world, monkeypatch, "one\n") == 0
    assert capsys.readouterr().out == "␛]0;title␇␛[2Jred␍\ufffd31m\tü\n"


@given(st.text(st.characters(codec=None)))
def test_harmless_text_has_no_control_characters_and_keeps_all_others(text: str) -> None:
    shown = harmless(text)
    assert len(shown) == len(text)
    shown.encode("utf-8")
    for before, after in zip(text, shown, strict=True):
        is_control = (ord(before) < 32 and before not in "\n\t") or 127 <= ord(before) < 160
        is_surrogate = 0xD800 <= ord(before) < 0xE000
        assert (after != before) == (is_control or is_surrogate)
        assert after.isprintable() or after in "\n\t" or after == before


@pytest.mark.parametrize(
    ("account", "line"),
    [
        (Account(), ""),
        (Account(prompt_tokens=9), "prompt 9 tokens"),
        (Account(prompt_tokens=1, cached_tokens=0), "prompt 1 token: 0 cached, 1 computed"),
        (
            Account(0.5, 2.5, 100, 60, 10, 41, "length"),
            "prompt 100 tokens: 60 cached, 10 rebuilt, 30 computed; first token 0.50 s; 41 tokens; "
            "20.0 tokens/s; cut off at the token limit",
        ),
        (Account(0.5, 0.5, completion_tokens=1), "first token 0.50 s; 1 token"),
    ],
)
def test_the_line_below_an_answer_says_what_the_server_told(account: Account, line: str) -> None:
    assert account_line(account) == line


# ---- what goes wrong


def test_no_server_is_one_line_and_a_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert run(["chat", "--url", "127.0.0.1:9"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    first, second = err.splitlines()
    assert first.startswith("forkpoint: error: no server answers at http://127.0.0.1:9")
    assert second.startswith("hint: ") and "forkpoint serve" in second


def test_a_key_is_asked_for_and_taken_from_anywhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("# ours\ntopsecret\nother\n")
    with serving(FakeEngine(reply=says("ok", EOS)), api_keys=("topsecret",)) as world:
        assert piped(world, monkeypatch, "hi\n") == 1
        err = capsys.readouterr().err
        assert "the server says 401" in err and "--api-key-file" in err
        assert piped(world, monkeypatch, "hi\n", "--api-key", "topsecret") == 0
        assert piped(world, monkeypatch, "hi\n", "--api-key-file", str(tmp_path / "keys")) == 0
        monkeypatch.setenv("FORKPOINT_API_KEY", "topsecret")
        assert piped(world, monkeypatch, "hi\n") == 0
    assert capsys.readouterr().out == "ok\n" * 3


@pytest.mark.parametrize("key", ["", "top\nsecret", "top\x00secret"])
def test_a_key_that_cannot_be_one_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigError) as raised:
        chat_with_server(ChatSettings(api_key=key))
    assert "secret" not in str(raised.value)


def test_an_unknown_model_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving() as world:
        assert piped(world, monkeypatch, "hi\n", "--model", "no/such") == 1
    err = capsys.readouterr().err
    assert "the server says 404" in err and "no/such" in err
    assert "Traceback" not in err


def test_a_loading_server_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(reply=says("ok", EOS))
    info, engine.info, engine.state = engine.info, None, EngineState.LOADING
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            engine.info, engine.state = info, EngineState.READY

    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    with serving(engine) as world:
        assert chat_with_server(ChatSettings(url=world.url), sleep=sleep) == 0
    out, err = capsys.readouterr()
    assert out == "ok\n"
    assert waits == [2.0, 2.0]  # what Retry-After says
    assert err.count("waiting: the model is still loading") == 2


def test_what_was_refused_is_said_and_left_out_of_the_chat() -> None:
    with serving(FakeEngine(reply=says("ok", EOS))) as world:
        screen, notes = chat(world, "one", "refuse me", "two")
        assert sent(world)[-1] == [("user", "one"), ("assistant", "ok"), ("user", "two")]
    assert screen == "ok\nok\n"
    assert "error: the server says 400: the chat template refuses these messages" in notes


def test_a_person_can_send_again_what_broke_off() -> None:
    with serving(FakeEngine(reply=says("abc"), is_held=True)) as world:
        engine = world.engine

        def fail() -> None:
            engine.until(lambda: engine.num_waiting == 1)
            engine.step(2)
            engine.fail_sequence(engine.submits[-1].uid, "out of luck")

        def repair() -> None:
            engine.reply = says("ok", EOS)
            engine.release()

        # The chat waits for its answer, so somebody else must make the engine fail.
        failing = threading.Thread(target=fail)
        screen, notes = chat(world, failing.start, "one", failing.join, repair, "/retry", "two")
        assert sent(world)[-1] == [("user", "one"), ("assistant", "ok"), ("user", "two")]
    assert screen.endswith("ok\nok\n")
    assert "error: the server broke off" in notes and "/retry" in notes


def test_a_proxy_is_not_asked_for_this_very_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with serving(FakeEngine(reply=says("ok", EOS))) as world:
        assert piped(world, monkeypatch, "hi\n") == 0
    assert capsys.readouterr().out == "ok\n"


# ---- other servers


@pytest.fixture
def canned() -> Iterator[Callable[[str, int, bytes, str], str]]:
    """Starts a server that answers everything with the same bytes: canned(status, body) gives its URL."""
    servers: list[http.server.HTTPServer] = []

    def start(_: str, status: int, body: bytes, content_type: str) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def _reply(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                self.send_response(status)
                self.send_header("content-type", content_type)
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = _reply

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (200, b"<html>hello", "no list of models"),
        (200, b'{"data": 3}', "no list of models"),
        (404, b'{"detail": "Not Found"}', "the server says 404: Not Found"),
        (401, b'{"error": "Unauthorized"}', "the server says 401: Unauthorized"),
        (400, b'{"object": "error", "message": "flat"}', "the server says 400: flat"),
        (502, b"<html>\n bad\x1b[2J gateway", "the server says 502: <html> bad"),
        (500, b"", "the server says 500: Internal Server Error"),
    ],
)
def test_whatever_a_server_says_becomes_one_line(
    canned: Callable[[str, int, bytes, str], str], status: int, body: bytes, message: str
) -> None:
    client = ChatClient(canned("", status, body, "application/json"))
    with pytest.raises(RemoteError) as raised:
        client.served_models()
    client.close()
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_answers_of_servers_without_usage_and_with_thoughts(
    canned: Callable[[str, int, bytes, str], str],
) -> None:
    events = (
        b': ping\n\ndata: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
        b'data: {"choices":[{"delta":{"reasoning_content":"hm"}}]}\n\n'
        b'data: {"choices":[{"delta":{"content":"hi"}}],"usage":null}\n\n'
        b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    )
    client = ChatClient(canned("", 200, events, "text/event-stream"))
    answer = client.answer("m", [{"role": "user", "content": "x"}], {})
    assert [(piece.text, piece.kind) for piece in answer.pieces] == [("hm", "reasoning"), ("hi", "answer")]
    assert (answer.account.finish_reason, answer.account.completion_tokens) == ("stop", None)
    screen, notes = Screen(), io.StringIO()
    ChatSession(client, Person("x"), Writer(screen, notes), model="m", options={}).run()
    assert screen.getvalue() == "\x1b[2mhm\n\x1b[0mhi\n"
    assert notes.getvalue().startswith("first token ")
    client.close()


@pytest.mark.parametrize(
    ("events", "content_type", "message"),
    [
        (b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n', "text/event-stream", "in the middle"),
        (b"data: {nonsense\n\n", "text/event-stream", "no JSON"),
        (b'data: {"choices":5}\n\n', "text/event-stream", "no chat chunk"),
        (b'data: {"choices":[5]}\n\n', "text/event-stream", "no chat chunk"),
        (b'data: {"choices":[{"delta":[5]}]}\n\n', "text/event-stream", "no chat chunk"),
        (b'data: {"error":{"message":"burnt"}}\n\ndata: [DONE]\n\n', "text/event-stream", "broke off: burnt"),
        (b"{}", "application/json", "no event stream"),
    ],
)
def test_streams_that_are_none_are_refused(
    canned: Callable[[str, int, bytes, str], str], events: bytes, content_type: str, message: str
) -> None:
    client = ChatClient(canned("", 200, events, content_type))
    with pytest.raises(RemoteError, match=message):
        list(client.answer("m", [], {}).pieces)
    client.close()


@pytest.mark.parametrize(
    ("given_url", "url"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("http://x:1/", "http://x:1"),
        ("https://x/v1/", "https://x"),
        ("https://x/prefix/v1", "https://x/prefix"),
        ("[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_an_address_may_be_written_in_several_ways(given_url: str, url: str) -> None:
    client = ChatClient(given_url)
    assert client.url == url
    client.close()


@pytest.mark.parametrize("url", ["", "http://", "ftp://x", "http://x:port", "http://x:99999"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="no address"):
        ChatClient(url)
