"""A client that leaves frees its sequences at once: streaming or not, running or queued."""

from __future__ import annotations

import pytest
from support.fake_engine import FakeEngine
from support.http_server import raw_request, read_until, serving


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("is_queued", [False, True])
def test_client_that_leaves_frees_all_its_choices(is_stream: bool, is_queued: bool) -> None:
    with serving(FakeEngine(is_held=True, is_admitting=not is_queued)) as world:
        engine = world.engine
        with raw_request(
            world.url, "/v1/completions", {"prompt": "hi", "n": 3, "stream": is_stream}
        ) as connection:
            engine.until(lambda: len(engine.submits) == 3)
            engine.step()
            if is_stream and not is_queued:
                read_until(connection, b'"text":"h"')
            assert (engine.num_waiting if is_queued else engine.num_running) == 3
        engine.until(lambda: len(engine.aborts) == 3)
        assert engine.num_running == engine.num_waiting == 0
        assert sorted(engine.aborts) == sorted(submit.uid for submit in engine.submits)
        engine.release()
        engine.is_admitting = True
        world.complete(max_tokens=1)
        assert world.metric('forkpoint_requests_total{finish_reason="abort"}') == 3


def test_official_client_that_closes_its_stream_stops_the_generation() -> None:
    with serving() as world:
        stream = world.openai.completions.create(model="alias", prompt="hi", max_tokens=2000, stream=True)
        next(iter(stream))
        stream.close()
        world.engine.until(lambda: world.engine.num_running == 0)


def test_other_requests_go_on_when_one_client_leaves() -> None:
    body = {"prompt": "hi", "max_tokens": 3, "stream": True}
    with serving(FakeEngine(is_held=True)) as world, raw_request(world.url, "/v1/completions", body) as stays:
        world.engine.until(lambda: len(world.engine.submits) == 1)
        with raw_request(world.url, "/v1/completions", body):
            world.engine.until(lambda: len(world.engine.submits) == 2)
            world.engine.step()
        world.engine.until(lambda: world.engine.aborts == [world.engine.submits[1].uid])
        world.engine.release()
        read_until(stays, b"[DONE]")


def test_sequences_that_finished_are_not_aborted() -> None:
    with serving() as world:
        world.complete(max_tokens=3, n=2)
        with world.http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as response:
            response.read()
        assert world.engine.aborts == []
