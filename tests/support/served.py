"""`forkpoint serve` as a user starts it: a process of its own, its log, its metrics, and clients for it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil

FORKPOINT = str(Path(sys.executable).with_name("forkpoint"))
# Far beyond what anything takes on a slow machine: reaching it is a failure, never a synchronisation.
PATIENCE_S = 120.0
POLL_S = 0.02


@dataclass
class ServedModel:
    """A running `forkpoint serve`. http: plain client. openai: the official one, without retries.

    ready_answers: every status that /ready gave from the bind until it was 200.
    """

    process: subprocess.Popen[str]
    url: str
    http: httpx2.Client
    openai: openai.OpenAI
    model: str
    log: ProcessLog
    ready_answers: list[int] = field(default_factory=list)

    def wait_ready(self) -> None:
        def is_ready() -> bool:
            self.ready_answers.append(self.http.get("/ready").status_code)
            return self.ready_answers[-1] == 200

        wait_until(is_ready, lambda: f"the server is not ready:\n{self.log.text}")

    def complete(self, prompt: str | list[int], **options: Any) -> dict[str, Any]:
        """The answer of /v1/completions, greedy unless `options` say otherwise."""
        body = {"prompt": prompt, "temperature": 0, **options}
        response = self.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def text(self, prompt: str | list[int], **options: Any) -> str:
        return str(self.complete(prompt, **options)["choices"][0]["text"])

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics: `name{labels}` to value."""
        response = self.http.get("/metrics")
        assert response.status_code == 200
        samples = (line.rpartition(" ") for line in response.text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    def pool(self, kind: str) -> dict[str, float]:
        """Slots of one pool (full, swa) by state, from /metrics."""
        return pool_of(self.metrics(), kind)

    def wait_idle(self) -> None:
        """Wait until nothing runs or waits in the engine."""

        def is_idle() -> bool:
            metrics = self.metrics()
            return metrics["forkpoint_requests_running"] == metrics["forkpoint_requests_waiting"] == 0

        wait_until(is_idle, lambda: f"requests go on: {self.metrics()}")

    def flush(self) -> None:
        """Empty the cache; every page must be free then."""
        self.wait_idle()
        assert self.http.post("/flush_cache").status_code == 200
        for kind in ("full", "swa"):
            pool = self.pool(kind)
            assert pool["free"] > 0
            assert pool["tree"] == pool["leased"] == 0, (kind, pool)

    def engine_process_id(self) -> int:
        """The child that owns the model; multiprocessing's own resource tracker is the other child."""
        children = psutil.Process(self.process.pid).children()
        engines = [child.pid for child in children if "spawn_main" in " ".join(child.cmdline())]
        assert len(engines) == 1, [child.cmdline() for child in children]
        return engines[0]

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def exit_code(self) -> int:
        """Wait for the end of the process."""
        return self.process.wait(PATIENCE_S)


def pool_of(metrics: dict[str, float], kind: str) -> dict[str, float]:
    """Slots of one pool by state, from what ServedModel.metrics() gave."""
    return {
        state: metrics[f'forkpoint_{kind}_slots{{state="{state}"}}'] for state in ("free", "tree", "leased")
    }


def wait_until(condition: Callable[[], bool], complaint: Callable[[], str]) -> None:
    """Poll until `condition` holds; fails with `complaint` after PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, complaint()
        time.sleep(POLL_S)


class ProcessLog:
    """What a process writes to stderr, read by a thread so that its pipe never fills."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._lines: list[str] = []
        self._news = threading.Condition()
        self._is_closed = False
        self._process = process
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def text(self) -> str:
        return "".join(self._lines)

    def wait_for_event(self, event: str) -> dict[str, Any]:
        """The first JSON log line of this event."""

        def found() -> dict[str, Any] | None:
            lines = (json.loads(line) for line in self._lines if line.startswith("{"))
            return next((line for line in lines if line.get("event") == event), None)

        with self._news:
            self._news.wait_for(lambda: found() is not None or self._is_closed, PATIENCE_S)
            line = found()
        assert line is not None, f"no {event!r} in the log:\n{self.text}"
        return line

    def close(self) -> None:
        """To be called when the process has ended."""
        self._thread.join(PATIENCE_S)

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            with self._news:
                self._lines.append(line)
                self._news.notify_all()
        with self._news:
            self._is_closed = True
            self._news.notify_all()


@contextlib.contextmanager
def serve(model: Path | str, *flags: str) -> Iterator[ServedModel]:
    """Start `forkpoint serve MODEL` in float32 on a free port, without waiting until it is ready.

    Ends it at the end, by SIGTERM if it still runs; that must give exit code 0.
    """
    options = ("--dtype", "float32", "--port", "0", "--log-format", "json", *flags)
    with launch(model, *options) as process:
        log = ProcessLog(process)
        try:
            url = log.wait_for_event("listening")["url"]
            with (
                httpx2.Client(base_url=url, timeout=PATIENCE_S) as http,
                openai.OpenAI(
                    base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=PATIENCE_S
                ) as client,
            ):
                yield ServedModel(process, url, http, client, Path(model).name, log)
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                assert process.wait(PATIENCE_S) == 0, log.text
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            log.close()


@contextlib.contextmanager
def serve_ready(model: Path | str, *flags: str) -> Iterator[ServedModel]:
    """Like serve(), and it is ready."""
    with serve(model, *flags) as served:
        served.wait_ready()
        yield served


@contextlib.contextmanager
def launch(model: Path | str, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """`forkpoint serve MODEL FLAGS` on the loopback, stderr in a pipe; killed if it is left alive."""
    # A setting of the person who runs the tests must not change what is tested.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("FORKPOINT_") or name == "FORKPOINT_CACHE"
    }
    # Beside other work on the same cores, threads that spin at every barrier make the demo 7 times slower and
    # a tiny model 10 times (2 cores, 2 busy neighbours, November 2026): tests would time out.
    environment.setdefault("GOMP_SPINCOUNT", "2000")
    with subprocess.Popen(
        [FORKPOINT, "serve", str(model), "--host", "127.0.0.1", *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
