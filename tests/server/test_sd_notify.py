"""What a service manager hears on its socket, and that its absence changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
from support.fake_engine import FakeEngine
from support.http_server import raw_request, read_until
from support.text_doubles import ByteTokenizer, TagTemplate

from forkpoint.configs.serving import ServerConfig
from forkpoint.scheduler.client import EngineState
from forkpoint.server.run import run_server
from forkpoint.server.sd_notify import ServiceNotifier


class Manager:
    """The socket of a service manager."""

    def __init__(self, name: str) -> None:
        self.address = name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + name[1:] if name.startswith("@") else name)
        self._socket.settimeout(20.0)

    def hear(self) -> list[str]:
        """The lines of the next message."""
        return self._socket.recv(65536).decode().split("\n")

    def heard(self) -> list[list[str]]:
        """All messages that are there already."""
        self._socket.setblocking(False)
        messages = []
        with contextlib.suppress(BlockingIOError):
            while True:
                messages.append(self.hear())
        self._socket.settimeout(20.0)
        return messages

    def is_silent_for(self, seconds: float) -> bool:
        self._socket.settimeout(seconds)
        try:
            self.hear()
        except TimeoutError:
            return True
        finally:
            self._socket.settimeout(20.0)
        return False

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    name = str(tmp_path / "notify") if request.param == "path" else f"@forkpoint-{uuid.uuid4()}"
    with contextlib.closing(Manager(name)) as manager:
        yield manager


def test_progress_is_told_once_per_percent(manager: Manager) -> None:
    notifier = ServiceNotifier(manager.address)
    heard = []
    for done in range(1001):
        notifier.progress("loading weights", done, 1000)
        heard += manager.heard()
    notifier.progress("warming up", 0, 0)
    heard += manager.heard()
    told = [f"STATUS=loading weights: {percent} %" for percent in range(101)]
    assert heard == [[line] for line in [*told, "STATUS=warming up: 100 %"]]


def test_progress_does_not_wait_for_a_manager_that_does_not_read(manager: Manager) -> None:
    notifier = ServiceNotifier(manager.address)
    started = time.monotonic()
    for done in range(1001):
        notifier.progress("loading weights", done, 1000)
    # A single message that waited would take five seconds.
    assert time.monotonic() - started < 4.0
    heard = manager.heard()
    assert heard[0] == ["STATUS=loading weights: 0 %"]
    assert len(heard) < 101, "the kernel keeps few messages, or this test says nothing"


def test_a_status_cannot_carry_a_second_field(manager: Manager) -> None:
    ServiceNotifier(manager.address).ready("serving a\nSTOPPING=1")
    assert manager.heard() == [["READY=1", "STATUS=serving a STOPPING=1"]]


@pytest.mark.parametrize(
    ("variables", "feeds"),
    [
        ({"WATCHDOG_USEC": "20000"}, True),
        ({"WATCHDOG_USEC": "20000", "WATCHDOG_PID": "7"}, True),
        ({"WATCHDOG_USEC": "20000", "WATCHDOG_PID": "8"}, False),
        ({"WATCHDOG_USEC": "0"}, False),
        ({"WATCHDOG_USEC": "soon"}, False),
        ({}, False),
    ],
)
def test_the_watchdog_is_fed_where_it_is_ours_and_while_all_is_well(
    tmp_path: Path, variables: dict[str, str], feeds: bool
) -> None:
    answers = iter([True, False, True])

    def is_well() -> bool:
        try:
            return next(answers)
        except StopIteration:
            raise asyncio.CancelledError from None

    with contextlib.closing(Manager(str(tmp_path / "notify"))) as manager:
        notifier = ServiceNotifier.of_environment({"NOTIFY_SOCKET": manager.address, **variables}, 7)
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(notifier.feed_watchdog(is_well))
        assert manager.heard() == ([["WATCHDOG=1"]] * 2 if feeds else [])


def test_without_a_manager_nothing_happens() -> None:
    notifier = ServiceNotifier.of_environment({"WATCHDOG_USEC": "1"}, 1)
    notifier.ready("serving")
    asyncio.run(notifier.feed_watchdog(lambda: pytest.fail("there is nobody to tell")))


@pytest.mark.parametrize("address", ["{}/gone", "vsock:2:1", "/" + "x" * 200])
def test_a_manager_that_cannot_be_reached_ends_nothing(tmp_path: Path, address: str) -> None:
    notifier = ServiceNotifier(address.format(tmp_path))
    notifier.ready("serving")
    notifier.stopping("ending")


def test_the_server_tells_of_readiness_and_of_the_drain_and_feeds_the_watchdog(manager: Manager) -> None:
    engine = FakeEngine(info=None, state=EngineState.LOADING, is_held=True)
    notifier = ServiceNotifier(manager.address, watchdog_s=0.02)

    def next_of(*fields: str) -> list[str]:
        while True:
            message = manager.hear()
            if message[0] in fields:
                return message

    def play(url: str) -> None:
        first, status = next_of("READY=1")
        assert status == f"STATUS=serving tiny on {url}"
        next_of("WATCHDOG=1")
        with raw_request(url, "/v1/completions", {"prompt": "hi", "max_tokens": 2}) as connection:
            engine.until(lambda: engine.submits)
            os.kill(os.getpid(), signal.SIGTERM)
            assert "running requests" in next_of("STOPPING=1")[1]
            next_of("WATCHDOG=1")  # a drain is no fault
            engine.seconds_since_step = 61.0
            # An answer of the loop later, nothing that was sent before can still be on its way.
            assert httpx2.get(f"{url}/livez").status_code == 200
            manager.heard()
            assert manager.is_silent_for(0.2), "a stuck step must not feed the watchdog"
            engine.seconds_since_step = 0.0
            next_of("WATCHDOG=1")
            engine.release()
            read_until(connection, b"finish_reason")

    player = Player(play)
    engine.info, engine.state = FakeEngine().info, EngineState.READY
    config = ServerConfig(served_model_names=("tiny",), host="127.0.0.1", port=0, log_level="error")
    try:
        code = run_server(
            config, engine, ByteTokenizer(), TagTemplate(), on_ready=player.start, notifier=notifier
        )
    finally:
        player.join()
    assert code == 0


class Player:
    """Plays the manager and a client in a thread: run_server needs the main one for its signals."""

    def __init__(self, play: Callable[[str], None]) -> None:
        self._play = play
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self, url: str) -> None:
        self._thread = threading.Thread(target=self._run, args=(url,))
        self._thread.start()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join(30)
        if self._error is not None:
            raise self._error

    def _run(self, url: str) -> None:
        try:
            self._play(url)
        except BaseException as error:
            self._error = error
            os.kill(os.getpid(), signal.SIGTERM)  # else the main thread would wait for ever
