"""`forkpoint top`: the figures from two looks, and the picture of a server over a socket."""

from __future__ import annotations

from typing import Any

import pytest
from support.fake_engine import FakeEngine
from support.http_server import serving

from forkpoint.configs.top_settings import TopSettings
from forkpoint.server.cli import run
from forkpoint.server.cli_top import show_top
from forkpoint.server.live_figures import live_figures


def look(now: float, last: int, steps: list[dict[str, Any]], **totals: int) -> dict[str, Any]:
    names = ("cached_tokens", "rebuilt_tokens", "computed_tokens", "generation_tokens")
    return {"now": now, "last": last, "steps": steps, "totals": {name: totals.get(name, 0) for name in names}}


def test_figures_are_of_the_time_between_two_looks() -> None:
    before = look(10.0, 3, [], cached_tokens=100, computed_tokens=100, generation_tokens=7)
    steps = [
        {"seconds": seconds, "prefill_rows": 5, "rebuild_rows": 2, "decode_rows": 1}
        for seconds in (0.01, 0.03, 0.02)
    ]
    after = look(
        12.0, 6, steps, cached_tokens=160, rebuilt_tokens=20, computed_tokens=120, generation_tokens=17
    )
    figures = live_figures(before, after)
    assert (figures.prompt_rate, figures.answer_rate) == (50.0, 5.0)
    assert (figures.recent.share, figures.overall.share) == (0.8, 0.6)
    assert (figures.step_ms, figures.longest_step_ms) == (20.0, 30.0)
    assert figures.rows == (15, 6, 3)
    idle = live_figures(after, look(13.0, 6, [], **after["totals"]))
    assert (idle.recent.share, idle.step_ms, idle.answer_rate) == (None, None, 0.0)


def test_the_picture_tells_speed_reuse_pools_and_requests(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(cached_tokens=3)
    with serving(engine) as world:

        def work(_: float) -> None:
            world.complete(max_tokens=4)
            engine.is_held = True

        assert show_top(TopSettings(url=world.url, once=True), sleep=work) == 0
    told = capsys.readouterr().out
    for part in (
        "org/tiny on http",
        "ready, ",
        "tokens/s",
        "since the start",
        "full attention",
        "sliding window",
        "kept",
    ):
        assert part in told, part
    assert "Traceback" not in told


def test_a_waiting_request_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(is_held=True)
    with serving(engine) as world:
        body = {"prompt": "hello", "max_tokens": 3, "stream": True}
        with world.http.stream("POST", "/v1/completions", json=body, headers={"x-request-id": "mine"}):
            engine.until(lambda: len(engine.submits) == 1)
            assert show_top(TopSettings(url=world.url, once=True), sleep=lambda _: None) == 0
    told = capsys.readouterr().out
    assert "mine" in told and "waiting" in told and "hello" not in told


def test_other_servers_keys_and_nobody_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", "--url", "http://127.0.0.1:9", "--once"]) == 1
    assert "no server answers" in capsys.readouterr().err
    with serving(FakeEngine(), api_keys=("k",)) as world:
        assert run(["top", "--url", world.url, "--once"]) == 1
        assert "--api-key" in capsys.readouterr().err
        assert run(["top", "--url", world.url, "--once", "--interval", "0.01", "--api-key", "k"]) == 0
    assert run(["top", "--interval", "0"]) == 2
    assert "--interval is 0" in capsys.readouterr().err
