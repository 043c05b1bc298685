"""/debug/steps and /debug/requests: what the page and `forkpoint top` read, from the API process alone."""

from __future__ import annotations

import pytest
from support.fake_engine import INFO, FakeEngine
from support.http_server import error_of, serving

from forkpoint.scheduler.messages import EngineStats, PoolStats, StepTokens
from forkpoint.server.step_log import StepLog


def step(*, prefill: int = 0, rebuild: int = 0, decode: int = 0) -> StepTokens:
    stats = EngineStats(running=decode, full=PoolStats(capacity=INFO.full_tokens))
    return StepTokens(
        uids=[], tokens=[], stats=stats, step_s=0.25,
        num_prefill_rows=prefill, num_rebuild_rows=rebuild, num_decode_rows=decode,
    )  # fmt: skip


def test_steps_are_told_from_a_number_on_and_split_by_their_rows() -> None:
    log = StepLog(FakeEngine())
    for number in range(1, 6):
        log.observe_step(step(prefill=10 * number, rebuild=number, decode=2))
    log.observe_step(step())  # reports an abort alone
    assert log.last == 5
    assert [each.number for each in log.after(0)] == [1, 2, 3, 4, 5]
    last = log.after(4)[0]
    assert (last.prefill_rows, last.rebuild_rows, last.decode_rows) == (45, 5, 2)
    assert (last.seconds, last.running) == (0.25, 2)
    assert log.after(5) == log.after(77) == []


def test_the_oldest_steps_are_forgotten() -> None:
    log = StepLog(FakeEngine(), kept=3)
    for _ in range(10):
        log.observe_step(step(decode=1))
    assert [each.number for each in log.after(0)] == [8, 9, 10]
    assert [each.number for each in log.after(9)] == [10]


def test_gauges_counters_and_steps_over_http() -> None:
    with serving(FakeEngine()) as world:
        world.complete(max_tokens=3)
        body = world.http.get("/debug/steps").json()
        assert body["state"] == "ready"
        assert body["pools"]["full"]["capacity"] == INFO.full_tokens
        assert body["totals"]["generation_tokens"] == 3
        assert body["last"] == len(body["steps"]) > 0
        assert sum(each["decode_rows"] for each in body["steps"]) >= 2
        newer = world.http.get(f"/debug/steps?after={body['last']}").json()
        assert newer["steps"] == []


@pytest.mark.parametrize("after", ["-1", "x", "1e3", "1" * 16, "٣"])
def test_a_wrong_number_is_refused(after: str) -> None:
    with serving(FakeEngine()) as world:
        assert error_of(world.http.get("/debug/steps", params={"after": after}), 400)["param"] == "after"


def test_requests_are_listed_while_they_are_under_way() -> None:
    engine = FakeEngine(is_held=True, cached_tokens=2)
    with serving(engine) as world:
        assert world.http.get("/debug/requests").json() == {"requests": [], "left_out": 0}
        with world.http.stream(
            "POST",
            "/v1/completions",
            json={"prompt": "hello", "max_tokens": 50, "n": 2, "stream": True},
            headers={"x-request-id": "mine"},
        ) as stream:
            engine.until(lambda: len(engine.submits) == 2)
            (waiting,) = world.http.get("/debug/requests").json()["requests"]
            assert (waiting["id"], waiting["path"], waiting["state"]) == (
                "mine",
                "/v1/completions",
                "waiting",
            )
            engine.step()
            engine.step()
            next(stream.iter_raw())
            (decoding,) = world.http.get("/debug/requests").json()["requests"]
            assert (decoding["state"], decoding["choices"]) == ("decode", 2)
            assert decoding["prompt_tokens"] >= len("hello")
            assert decoding["cached_tokens"] == 2
            assert decoding["completion_tokens"] >= 2 and decoding["age_s"] >= 0
            assert "hello" not in str(decoding)
        engine.is_held = False
        engine.step()
        world.complete(max_tokens=1)
        assert world.http.get("/debug/requests").json()["requests"] == []


def test_neither_asks_the_engine() -> None:
    engine = FakeEngine()
    with serving(engine) as world:
        world.http.get("/debug/steps")
        world.http.get("/debug/requests")
        assert engine.described_max_nodes == []
        assert engine.submits == []
