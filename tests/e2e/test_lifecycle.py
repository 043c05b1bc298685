"""The life of the server: start, readiness, drain, the death of its engine, and clients that leave."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from support.http_server import error_of, raw_request, read_until
from support.served import PATIENCE_S, ServedModel, launch, serve, wait_until

PROMPT = "hello world"


def test_requests_get_503_while_the_engine_loads(letters_dir: Path) -> None:
    with serve(letters_dir) as served:
        # Importing torch takes the engine seconds; the server answers from the bind on.
        refusal = served.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4})
        assert error_of(refusal, 503)["code"] == "service_unavailable"
        assert int(refusal.headers["retry-after"]) > 0
        assert served.http.get("/livez").status_code == 200
        served.wait_ready()
        assert set(served.ready_answers) == {200, 503}
        assert served.complete(PROMPT, max_tokens=4)["usage"]["completion_tokens"] >= 1


def test_second_server_on_the_port_says_so_in_one_line(letters_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with launch(letters_dir, "--port", str(port)) as process:
            _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    first, hint = errors.splitlines()
    assert first == f"forkpoint: error: port {port} on 127.0.0.1 is in use by another process"
    assert "--port" in hint


def test_missing_model_is_one_line_and_a_hint(tmp_path: Path) -> None:
    with launch(tmp_path / "nothing", "--port", "0") as process:
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    first, hint = errors.splitlines()
    assert first.startswith("forkpoint: error: ") and "nothing" in first
    assert hint.startswith("hint: ")


def test_sigterm_lets_the_stream_finish_and_refuses_new_requests(letters_dir: Path) -> None:
    with serve(letters_dir) as served:
        served.wait_ready()
        num_tokens = 1500
        stream = stream_events(served, prompt=PROMPT, max_tokens=num_tokens, ignore_eos=True, usage=True)
        next(stream)
        served.terminate()
        wait_until(lambda: served.http.get("/ready").status_code == 503, lambda: "/ready stays 200")
        refusal = served.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1})
        assert error_of(refusal, 503)["message"]
        assert int(refusal.headers["retry-after"]) > 0
        assert served.http.get("/livez").status_code == 200
        assert served.process.poll() is None
        *_, finish, usage = stream
        assert finish["choices"][0]["finish_reason"] == "length"
        assert usage["usage"]["completion_tokens"] == num_tokens
        assert served.exit_code() == 0


def test_shutdown_timeout_ends_a_stream_with_an_error_event(letters_dir: Path) -> None:
    with serve(letters_dir, "--shutdown-timeout", "0.2") as served:
        served.wait_ready()
        stream = stream_events(served, prompt=PROMPT, max_tokens=4000, ignore_eos=True)
        next(stream)
        served.terminate()
        *_, last = stream
        assert "shutting down" in last["error"]["message"]
        assert served.exit_code() == 0


def test_dead_engine_ends_streams_and_comes_back(letters_dir: Path) -> None:
    with serve(letters_dir) as served:
        served.wait_ready()
        expected = served.text(PROMPT, max_tokens=20, ignore_eos=True)
        stream = stream_events(served, prompt=PROMPT, max_tokens=4000, ignore_eos=True)
        next(stream)
        os.kill(served.engine_process_id(), signal.SIGKILL)
        killed_at = time.monotonic()
        *_, last = stream
        assert time.monotonic() - killed_at < 1.0
        assert last["error"]["type"] == "server_error"
        refusal = served.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1})
        assert error_of(refusal, 503)["code"] == "service_unavailable"
        assert int(refusal.headers["retry-after"]) > 0
        assert served.http.get("/livez").status_code == 200
        served.wait_ready()
        assert served.text(PROMPT, max_tokens=20, ignore_eos=True) == expected
        assert served.metrics()["forkpoint_engine_restarts_total"] == 1
        served.flush()


@pytest.mark.parametrize("is_stream", [False, True])
def test_clients_that_leave_free_their_pages(fragments: ServedModel, is_stream: bool) -> None:
    """Case A11: four clients give up at once, a fifth is served."""
    fragments.flush()
    body = {"prompt": "hold on", "max_tokens": 3900, "ignore_eos": True, "stream": is_stream}
    with contextlib.ExitStack() as clients:
        for _ in range(4):
            connection = clients.enter_context(raw_request(fragments.url, "/v1/completions", body))
            if is_stream:
                read_until(connection, b"data: ")
        wait_until(lambda: running(fragments) == 4, lambda: f"{running(fragments)} run")
    left_at, steps_at_leave = time.monotonic(), num_steps(fragments)
    wait_until(lambda: running(fragments) == 0, lambda: f"{running(fragments)} run")
    # A step takes milliseconds; the bound of case A11 is 2 s.
    assert time.monotonic() - left_at < 2.0
    assert num_steps(fragments) - steps_at_leave < 400, "4 * 3,900 tokens were not to be computed"
    for kind in ("full", "swa"):
        assert fragments.pool(kind)["leased"] == 0
    assert fragments.complete("next", max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3
    fragments.flush()


def test_official_client_that_closes_its_stream_aborts_the_request(fragments: ServedModel) -> None:
    stream = fragments.openai.completions.create(
        model=fragments.model, prompt="hold on", max_tokens=3900, stream=True, extra_body={"ignore_eos": True}
    )
    assert isinstance(stream, openai.Stream)
    next(stream)
    assert running(fragments) == 1
    stream.close()
    wait_until(lambda: running(fragments) == 0, lambda: f"{running(fragments)} run")
    fragments.flush()


def running(served: ServedModel) -> int:
    return int(served.metrics()["forkpoint_requests_running"])


def num_steps(served: ServedModel) -> int:
    metrics = served.metrics()
    return int(sum(metrics[f'forkpoint_step_seconds_count{{phase="{p}"}}'] for p in ("prefill", "decode")))


def stream_events(served: ServedModel, *, usage: bool = False, **body: Any) -> Iterator[dict[str, Any]]:
    """The JSON events of a streamed completion, as they arrive, without [DONE]."""
    options = {"stream_options": {"include_usage": True}} if usage else {}
    # A client of its own: the stream must not hold the connection that the test's other requests use.
    with (
        httpx2.Client(base_url=served.url, timeout=PATIENCE_S) as client,
        client.stream("POST", "/v1/completions", json={**body, **options, "stream": True}) as response,
    ):
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))
