"""The engine loads, is full, dies, comes back, or fails one request: what the clients see."""

from __future__ import annotations

import concurrent.futures
import threading
from typing import Any

import httpx2
import openai
import pytest
from support.fake_engine import FakeEngine
from support.http_server import MODEL, World, error_of, raw_request, read_until, serving

from forkpoint.scheduler.client import EngineState


def test_loading_server_answers_503_with_retry_after() -> None:
    with serving(FakeEngine(state=EngineState.LOADING, info=None)) as world:
        for response in (
            world.http.post("/v1/completions", json={"prompt": "hi"}),
            world.http.post("/v1/chat/completions", content=b"not even json"),
            world.http.get("/v1/models"),
            world.http.post("/flush_cache"),
            world.http.get("/health"),
            world.http.get("/ready"),
        ):
            assert "loading" in error_of(response, 503)["message"]
            assert int(response.headers["retry-after"]) >= 1
        assert world.http.get("/livez").status_code == 200
        assert world.metric('forkpoint_rejected_requests_total{reason="loading"}') == 2


def test_full_queue_is_a_429_with_retry_after_and_submits_nothing() -> None:
    with serving(FakeEngine(is_held=True, max_queued=2)) as world:
        response = world.http.post("/v1/completions", json={"prompt": "hi", "n": 3})
        assert error_of(response, 429)["code"] == "rate_limit_exceeded"
        assert response.headers["retry-after"] == "3"
        assert world.engine.num_waiting == 0
        with pytest.raises(openai.RateLimitError):
            world.openai.completions.create(model=MODEL, prompt="hi", n=3, stream=True)
        assert world.metric('forkpoint_rejected_requests_total{reason="queue_full"}') == 2


def test_running_request_gets_500_and_a_queued_one_503_when_the_engine_dies() -> None:
    with serving(FakeEngine(is_held=True)) as world:
        running = _post_in_background(world, {"prompt": "first", "max_tokens": 9})
        world.engine.until(lambda: len(world.engine.submits) == 1)
        world.engine.step()
        world.engine.is_admitting = False
        waiting = _post_in_background(world, {"prompt": "second"})
        world.engine.until(lambda: len(world.engine.submits) == 2)
        world.engine.die()
        assert error_of(running(), 500)["code"] == "generation_failed"
        response = waiting()
        error_of(response, 503)
        assert response.headers["retry-after"] == "5"
        assert world.http.get("/health").status_code == 503
        assert world.http.get("/ready").status_code == 503
        assert world.http.get("/livez").status_code == 200
        error_of(world.http.post("/v1/completions", json={"prompt": "third"}), 503)


def test_server_serves_again_after_the_engine_came_back() -> None:
    with serving(FakeEngine()) as world:
        world.complete(max_tokens=1)
        world.engine.die()
        error_of(world.http.post("/v1/completions", json={"prompt": "hi"}), 503)
        world.engine.restart()
        world.complete(max_tokens=1)
        assert world.http.get("/health").status_code == 200
        assert world.metric("forkpoint_engine_restarts_total") == 1


def test_engine_that_dies_in_mid_stream_ends_the_stream_with_an_error_event() -> None:
    body = {"prompt": "hi", "stream": True}
    with (
        serving(FakeEngine(is_held=True)) as world,
        raw_request(world.url, "/v1/completions", body) as connection,
    ):
        world.engine.until(lambda: world.engine.submits)
        world.engine.step()
        read_until(connection, b'"text":"h"')
        world.engine.die()
        rest = read_until(connection, b"0\r\n\r\n")  # the end of the chunked response
        assert rest.count(b'data: {"error":{"message":') == 1
        assert rest.index(b'"error"') < rest.index(b"data: [DONE]\n\n")


def test_official_client_raises_on_an_error_in_mid_stream() -> None:
    with serving(FakeEngine(is_held=True)) as world:

        def fail_after_first_token() -> None:
            world.engine.until(lambda: world.engine.submits)
            world.engine.step()
            world.engine.fail_sequence(world.engine.submits[0].uid, "the step ran out of memory")

        helper = threading.Thread(target=fail_after_first_token)
        helper.start()
        with pytest.raises(openai.APIError, match="the step ran out of memory"):
            list(world.openai.completions.create(model=MODEL, prompt="hi", stream=True))
        helper.join()


def test_failure_of_one_choice_fails_its_request_and_frees_the_others() -> None:
    with serving(FakeEngine(is_held=True)) as world:
        answer = _post_in_background(world, {"prompt": "hi", "n": 3, "max_tokens": 9})
        world.engine.until(lambda: len(world.engine.submits) == 3)
        world.engine.step()
        world.engine.fail_sequence(world.engine.submits[1].uid, "bad step")
        assert "bad step" in error_of(answer(), 500)["message"]
        world.engine.until(lambda: world.engine.num_running == 0)
        assert world.metric('forkpoint_requests_total{finish_reason="error"}') == 3


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_request_that_cannot_be_followed_any_further_is_a_400_which_nobody_repeats(path: str) -> None:
    is_chat = path == "/v1/chat/completions"
    asked = {"messages": [{"role": "user", "content": "hi"}]} if is_chat else {"prompt": "hi"}
    with serving(FakeEngine(is_held=True)) as world:
        with concurrent.futures.ThreadPoolExecutor() as threads:
            answer = threads.submit(world.http.post, path, json={**asked, "max_tokens": 9})
            world.engine.until(lambda: world.engine.submits)
            world.engine.step()
            uid = world.engine.submits[0].uid
            world.engine.fail_sequence(uid, "no token is left to choose from", is_own_fault=True)
            error = error_of(answer.result(), 400)
        assert error["type"] == "invalid_request_error" and error["code"] == "generation_failed"
        assert error["message"] == "no token is left to choose from"


def test_fault_of_our_own_is_a_500_that_tells_nothing_and_the_server_lives(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(submit: Any) -> Any:
        raise ZeroDivisionError("secret")

    with serving(FakeEngine(reply=broken)) as world:
        response = world.http.post("/v1/completions", json={"prompt": "hi"})
        assert "secret" not in error_of(response, 500)["message"]
        assert response.headers["x-request-id"]
        world.engine.reply = FakeEngine().reply
        world.complete(max_tokens=1)
    assert "ZeroDivisionError" in capsys.readouterr().out


def _post_in_background(world: World, body: dict[str, Any]):  # type: ignore[no-untyped-def]
    """Send a request from another thread; calling what this returns waits for the response."""
    responses: list[httpx2.Response] = []
    thread = threading.Thread(
        target=lambda: responses.append(httpx2.post(f"{world.url}/v1/completions", json=body, timeout=20))
    )
    thread.start()

    def wait() -> httpx2.Response:
        thread.join(20)
        return responses[0]

    return wait
