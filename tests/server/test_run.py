"""run_server from bind to exit code: early 503, draining on SIGTERM, and errors that end it.

The server runs in the main thread of the test process, since it handles signals; a second thread plays the
clients and sends the signals.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import httpx2
import pytest
from support.fake_engine import INFO, FakeEngine, says
from support.http_server import error_of, raw_request, read_until
from support.text_doubles import ByteTokenizer, TagTemplate

from forkpoint.configs.errors import ConfigError, EngineDied, ModelLoadError
from forkpoint.configs.serving import ServerConfig
from forkpoint.scheduler.client import EngineState
from forkpoint.server.listener import bind_listener
from forkpoint.server.run import run_server

STREAM = {"prompt": "hello", "max_tokens": 4, "stream": True}


@pytest.fixture(autouse=True)
def _logging_of_pytest_survives() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers = handlers
    root.setLevel(level)


def test_idle_server_ends_at_once_with_0_and_stops_the_engine() -> None:
    engine = FakeEngine()
    assert _run(engine, lambda url: _terminate()) == 0
    assert engine.state is EngineState.STOPPED


def test_interrupt_ends_the_server_too() -> None:
    assert _run(FakeEngine(), lambda url: os.kill(os.getpid(), signal.SIGINT)) == 0


def test_draining_server_refuses_new_requests_and_lets_running_ones_finish() -> None:
    engine = FakeEngine(is_held=True)

    def clients(url: str) -> None:
        with raw_request(url, "/v1/completions", STREAM) as connection:
            engine.until(lambda: engine.submits)
            engine.step()
            read_until(connection, b'"text":"h"')
            _terminate()
            _wait_until_draining(url)
            refused = httpx2.post(f"{url}/v1/completions", json={"prompt": "hi"})
            assert "shutting down" in error_of(refused, 503)["message"]
            assert refused.headers["retry-after"]
            error_of(httpx2.get(f"{url}/health"), 503)
            assert httpx2.get(f"{url}/livez").status_code == 200
            engine.release()
            rest = read_until(connection, b"data: [DONE]\n\n")
            assert b'"finish_reason":"length"' in rest and b"error" not in rest

    assert _run(engine, clients) == 0


def test_streams_that_outlast_the_timeout_end_with_an_error_event() -> None:
    engine = FakeEngine(is_held=True)

    def clients(url: str) -> None:
        whole = {"prompt": "hello"}
        with (
            raw_request(url, "/v1/completions", STREAM) as stream,
            raw_request(url, "/v1/completions", whole) as other,
        ):
            engine.until(lambda: len(engine.submits) == 2)
            engine.step()
            read_until(stream, b'"text":"h"')
            _terminate()
            rest = read_until(stream, b"data: [DONE]\n\n")
            assert b'data: {"error":{"message":"the server is shutting down' in rest
            assert read_until(other, b"\r\n").startswith(b"HTTP/1.1 503")

    assert _run(engine, clients, shutdown_timeout_s=0.05) == 0
    assert len(engine.aborts) == 2


def test_second_signal_ends_the_streams_now() -> None:
    engine = FakeEngine(is_held=True)

    def clients(url: str) -> None:
        with raw_request(url, "/v1/completions", STREAM) as stream:
            engine.until(lambda: engine.submits)
            engine.step()
            _terminate()
            _wait_until_draining(url)
            _terminate()
            assert b'"error"' in read_until(stream, b"data: [DONE]\n\n")

    assert _run(engine, clients, shutdown_timeout_s=600) == 0


def test_client_that_never_reads_does_not_hold_the_exit_up() -> None:
    engine = FakeEngine(reply=says("x" * 2000), is_held=True)
    stuck = threading.Event()

    def clients(url: str) -> None:
        body = {"prompt": "p", "n": 128, "max_tokens": 1000, "stream": True}
        with raw_request(url, "/v1/completions", body):
            engine.until(lambda: len(engine.submits) == 128)
            engine.release()  # some 30 MB of events, more than the socket buffers take
            engine.until(lambda: engine.stats.num_steps >= 1000, timeout_s=30)
            _terminate()
            stuck.wait(30)

    assert _run(engine, clients, shutdown_timeout_s=0.05, at_exit=stuck.set) == 0


def test_port_is_bound_early_and_answers_503_until_the_engine_is_ready() -> None:
    engine = FakeEngine(state=EngineState.LOADING, info=None)
    port = _free_port()

    def clients() -> None:
        response = _first_response(f"http://127.0.0.1:{port}/ready")
        assert "loading" in error_of(response, 503)["message"]
        assert response.headers["retry-after"]
        engine.info, engine.state = INFO, EngineState.READY

    early = threading.Thread(target=clients)
    early.start()
    seen = []

    def when_ready(url: str) -> None:
        seen.append((url, httpx2.get(f"{url}/ready").status_code))
        _terminate()

    assert _run(engine, when_ready, port=port) == 0
    early.join(10)
    assert seen == [(f"http://127.0.0.1:{port}", 200)]


def test_signal_while_loading_ends_with_0() -> None:
    engine = FakeEngine(state=EngineState.LOADING, info=None)
    port = _free_port()

    def clients() -> None:
        _first_response(f"http://127.0.0.1:{port}/ready")
        _terminate()

    early = threading.Thread(target=clients)
    early.start()
    assert _run(engine, lambda url: None, port=port) == 0
    early.join(10)
    assert engine.state is EngineState.STOPPED


def test_port_in_use_is_an_error_with_the_flag_to_change() -> None:
    with bind_listener("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=str(port)) as caught:
            run_server(_config(port=port), FakeEngine(), ByteTokenizer(), None)
        assert "--port" in str(caught.value.hint)


def test_host_that_does_not_exist_is_an_error_with_the_flag_to_change() -> None:
    with pytest.raises(ConfigError) as caught:
        run_server(_config(host="not a host"), FakeEngine(), ByteTokenizer(), None)
    assert "--host" in str(caught.value.hint)


def test_error_of_loading_is_raised() -> None:
    engine = FakeEngine(state=EngineState.LOADING, load_error=ModelLoadError("no such tensor"))
    with pytest.raises(ModelLoadError, match="no such tensor"):
        run_server(_config(), engine, ByteTokenizer(), None)


def test_engine_that_gave_up_for_good_ends_the_server_with_an_error() -> None:
    engine = FakeEngine()

    def give_up(url: str) -> None:
        engine.state = EngineState.STOPPED

    with pytest.raises(EngineDied):
        _run(engine, give_up)


@dataclass
class _Clients:
    """A thread that plays the clients; keeps what went wrong in it."""

    play: Callable[[str], None]
    errors: list[BaseException] = field(default_factory=list)
    thread: threading.Thread | None = None

    def start(self, url: str) -> None:
        self.thread = threading.Thread(target=self._run, args=(url,))
        self.thread.start()

    def _run(self, url: str) -> None:
        try:
            self.play(url)
        except BaseException as error:
            self.errors.append(error)
            _terminate()  # else the main thread would wait for ever

    def join(self) -> None:
        if self.thread is not None:
            self.thread.join(30)
        if self.errors:
            raise self.errors[0]


def _run(
    engine: FakeEngine,
    clients: Callable[[str], None],
    *,
    port: int = 0,
    shutdown_timeout_s: float = 20.0,
    at_exit: Callable[[], None] = lambda: None,
) -> int:
    player = _Clients(clients)
    config = _config(port=port, shutdown_timeout_s=shutdown_timeout_s)
    try:
        return run_server(config, engine, ByteTokenizer(), TagTemplate(), on_ready=player.start)
    finally:
        at_exit()
        player.join()


def _config(*, host: str = "127.0.0.1", port: int = 0, shutdown_timeout_s: float = 20.0) -> ServerConfig:
    return ServerConfig(
        served_model_names=("tiny",),
        host=host,
        port=port,
        shutdown_timeout_s=shutdown_timeout_s,
        log_level="error",
    )


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _wait_until_draining(url: str) -> None:
    # The signal is handled by the loop of another thread; each request is a round trip through that loop.
    for _ in range(1000):
        if httpx2.get(f"{url}/ready").status_code == 503:
            return
    pytest.fail("the server did not begin to drain")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _first_response(url: str) -> httpx2.Response:
    while True:
        try:
            return httpx2.get(url)
        except httpx2.ConnectError:
            continue
