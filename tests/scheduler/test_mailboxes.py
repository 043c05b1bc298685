"""Mailboxes: tokens merge while nobody reads, and an error comes after what arrived before it."""

from __future__ import annotations

import asyncio

import pytest

from forkpoint.configs.errors import EngineDied
from forkpoint.scheduler.client import TokenDelta
from forkpoint.scheduler.mailboxes import Mailboxes
from forkpoint.scheduler.messages import Finish, Started, StepTokens


def step(uid: int, token: int, **kwargs: object) -> StepTokens:
    return StepTokens([uid], [token], **kwargs)  # type: ignore[arg-type]


def test_a_slow_reader_gets_all_tokens_as_one_delta() -> None:
    async def story() -> None:
        mailboxes = Mailboxes(max_queued=None)
        box = mailboxes.open(7, max_running=1)
        start, finish = Started(7, 3, 0, 0.1), Finish(7, "length")
        mailboxes.deliver(step(7, 10, started=(start,)))
        mailboxes.deliver(step(7, 11))
        mailboxes.deliver(step(7, 12, finished=(finish,)))
        assert await box.get() == TokenDelta((10, 11, 12), start, finish)
        assert mailboxes.num_open == 0

    asyncio.run(story())


def test_an_error_comes_after_the_tokens_before_it() -> None:
    async def story() -> None:
        mailboxes = Mailboxes(max_queued=None)
        box = mailboxes.open(7, max_running=1)
        mailboxes.deliver(step(7, 10))
        mailboxes.fail_all(EngineDied("gone"))
        assert (await box.get()).tokens == (10,)
        for _ in range(2):
            with pytest.raises(EngineDied):
                await box.get()

    asyncio.run(story())


def test_what_the_engine_says_after_an_abort_is_dropped() -> None:
    async def story() -> None:
        mailboxes = Mailboxes(max_queued=None)
        box = mailboxes.open(7, max_running=1)
        mailboxes.close(7)
        mailboxes.deliver(step(7, 10, finished=(Finish(7, "abort"),)))
        assert await box.get() == TokenDelta((), None, Finish(7, "abort"))

    asyncio.run(story())
