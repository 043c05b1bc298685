"""The engine process from the outside: ready, tokens, death, restart, giving up, and a clean end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from support.checking_runner import expected_continuation
from support.engine_entries import die_at_once, serve_broken_model, serve_checked
from support.engine_world import VOCAB_SIZE

from forkpoint.configs.errors import EngineDied, EngineLoading, ModelLoadError, QueueFull
from forkpoint.configs.sampling import SamplingParams
from forkpoint.configs.serving import EngineConfig
from forkpoint.scheduler import process_client
from forkpoint.scheduler.client import EngineState, TokenMailbox
from forkpoint.scheduler.messages import Finish, LoadProgress, Submit
from forkpoint.scheduler.process_client import ProcessEngine

CONFIG = EngineConfig(model_dir=Path("unused"))
PATIENCE_S = 60.0


def submit(uid: int, prompt: list[int], max_tokens: int) -> Submit:
    params = SamplingParams(seed=uid, max_tokens=max_tokens, temperature=0.0)
    return Submit(uid, np.array(prompt, dtype=np.int32), params)


async def read_all(mailbox: TokenMailbox) -> tuple[list[int], Finish]:
    tokens: list[int] = []
    while True:
        delta = await asyncio.wait_for(mailbox.get(), PATIENCE_S)
        tokens.extend(delta.tokens)
        if delta.finish is not None:
            return tokens, delta.finish


async def started(**kwargs: object) -> ProcessEngine:
    engine = ProcessEngine(CONFIG, entry=serve_checked, **kwargs)  # type: ignore[arg-type]
    await engine.start()
    await asyncio.wait_for(engine.wait_ready(), PATIENCE_S)
    return engine


async def wait_for(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


def test_tokens_cross_the_pipe_and_the_pools_are_empty_after_a_flush() -> None:
    async def story() -> None:
        engine = ProcessEngine(CONFIG, entry=serve_checked)
        seen: list[LoadProgress] = []
        engine.on_progress(seen.append)
        await engine.start()
        assert (engine.state, engine.info) == (EngineState.LOADING, None)
        with pytest.raises(EngineLoading):
            engine.submit(submit(0, [1], 1))
        info = await asyncio.wait_for(engine.wait_ready(), PATIENCE_S)
        assert info.window == 16 and seen == [LoadProgress("loading weights", 1, 1)]
        boxes = [engine.submit(submit(uid, [uid, 2, 3], 20)) for uid in range(5)]
        for uid, box in enumerate(boxes):
            tokens, finish = await read_all(box)
            assert tokens == expected_continuation([uid, 2, 3], 20, VOCAB_SIZE)
            assert finish.reason == "length"
        assert await engine.flush_cache()
        assert engine.stats.full.free == engine.stats.full.capacity
        assert engine.stats.swa.free == engine.stats.swa.capacity
        assert engine.seconds_since_step == 0.0
        await engine.stop()
        assert engine.state is EngineState.STOPPED

    asyncio.run(story())


def test_an_engine_spawned_before_the_event_loop_is_the_one_that_serves() -> None:
    engine = ProcessEngine(CONFIG, entry=serve_checked)
    engine.spawn()
    pid = engine.process_id

    async def story() -> None:
        seen: list[LoadProgress] = []
        engine.on_progress(seen.append)
        await engine.start()
        await asyncio.wait_for(engine.wait_ready(), PATIENCE_S)
        assert engine.process_id == pid is not None
        assert seen == [LoadProgress("loading weights", 1, 1)], "what came before the loop is not lost"
        assert [name for name, _ in engine.stages] == ["imports", "loading weights"]
        tokens, _ = await read_all(engine.submit(submit(0, [1, 2, 3], 5)))
        assert tokens == expected_continuation([1, 2, 3], 5, VOCAB_SIZE)
        await engine.stop()

    asyncio.run(story())
    assert engine.process_id is None


def test_a_start_that_is_given_up_leaves_no_process() -> None:
    engine = ProcessEngine(CONFIG, entry=serve_checked)
    engine.spawn()
    child = psutil.Process(engine.process_id)
    engine.close()
    engine.close()
    assert not child.is_running()
    assert engine.state is EngineState.STOPPED


def test_the_cache_is_described_across_the_pipe_beside_flushes() -> None:
    async def story() -> None:
        engine = await started()
        await read_all(engine.submit(submit(1, list(range(40)), 1)))
        few, many, cleared, after = await asyncio.gather(
            engine.describe_cache(1),
            engine.describe_cache(100),
            engine.flush_cache(),
            engine.describe_cache(9),
        )
        assert (len(few.tree.nodes), few.tree.omitted_nodes) == (1, 1)
        assert [node.full for node in many.tree.nodes] == [0, 40]
        assert many.stats.full.tree == 40
        assert cleared and after.tree.nodes == () and after.stats.full.tree == 0
        assert engine.seconds_since_step == 0.0
        await engine.stop()
        with pytest.raises(EngineLoading):
            await engine.describe_cache(1)

    asyncio.run(story())


def test_abort_ends_the_mailbox_at_once_and_frees_the_pages() -> None:
    async def story() -> None:
        engine = await started()
        box = engine.submit(submit(1, [1, 2, 3], 1900))
        await asyncio.wait_for(box.get(), PATIENCE_S)
        assert not await engine.flush_cache(), "a running request keeps its pages"
        engine.abort(1)
        engine.abort(1)
        _, finish = await read_all(box)
        assert finish.reason == "abort"
        await wait_for(lambda: engine.stats.running == 0)
        assert engine.stats.full.leased == 0
        await engine.stop()

    asyncio.run(story())


def test_a_full_queue_refuses() -> None:
    async def story() -> None:
        engine = await started(max_queued=1)
        boxes = [engine.submit(submit(uid, [uid], 1000)) for uid in range(3)]
        with pytest.raises(QueueFull, match="--max-queued-requests"):
            engine.submit(submit(9, [9], 1))
        for uid in range(3):
            engine.abort(uid)
            await read_all(boxes[uid])
        await engine.stop()

    asyncio.run(story())


def test_a_killed_engine_fails_its_requests_and_comes_back() -> None:
    async def story() -> None:
        engine = await started()
        box = engine.submit(submit(1, [1, 2, 3], 1900))
        await asyncio.wait_for(box.get(), PATIENCE_S)
        assert engine.process_id is not None
        os.kill(engine.process_id, signal.SIGKILL)
        with pytest.raises(EngineDied):
            while True:
                await asyncio.wait_for(box.get(), PATIENCE_S)
        with pytest.raises((EngineDied, EngineLoading)):
            engine.submit(submit(2, [1], 1))
        await wait_for(lambda: engine.state is EngineState.READY)
        assert engine.num_restarts == 1
        tokens, _ = await read_all(engine.submit(submit(3, [1, 2, 3], 4)))
        assert tokens == expected_continuation([1, 2, 3], 4, VOCAB_SIZE)
        await engine.stop()

    asyncio.run(story())


def test_an_engine_that_dies_too_often_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_client, "MAX_DEATHS", 1)

    async def story() -> None:
        engine = await started()
        assert engine.process_id is not None
        os.kill(engine.process_id, signal.SIGKILL)
        await wait_for(lambda: engine.state is EngineState.STOPPED)
        with pytest.raises(EngineDied):
            engine.submit(submit(1, [1], 1))
        await engine.stop()

    asyncio.run(story())


def test_a_model_that_cannot_be_loaded_says_why() -> None:
    async def story() -> None:
        engine = ProcessEngine(CONFIG, entry=serve_broken_model)
        await engine.start()
        with pytest.raises(ModelLoadError, match="model.norm.weight") as caught:
            await asyncio.wait_for(engine.wait_ready(), PATIENCE_S)
        assert caught.value.hint == "fetch it again"
        assert engine.state is EngineState.STOPPED
        await engine.stop()

    asyncio.run(story())


def test_a_process_that_ends_while_loading_is_reported() -> None:
    async def story() -> None:
        engine = ProcessEngine(CONFIG, entry=die_at_once)
        await engine.start()
        with pytest.raises(EngineDied, match="while it was loading"):
            await asyncio.wait_for(engine.wait_ready(), PATIENCE_S)
        await engine.stop()

    asyncio.run(story())


def test_the_engine_ends_when_the_api_process_is_gone() -> None:
    async def story() -> None:
        engine = await started()
        link = engine._detach()
        assert link is not None
        link._outbox.close()
        await asyncio.to_thread(link.process.join, PATIENCE_S)
        assert link.process.exitcode == 0
        link.close()

    asyncio.run(story())
