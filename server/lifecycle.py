"""The phases of the API process from the view of one request: is it taken, and how long may it run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from forkpoint.configs.errors import EngineDied, EngineDraining, EngineLoading
from forkpoint.scheduler.client import EngineClient, EngineState

# A step takes tens of milliseconds, a prefill chunk on a slow CPU a few seconds.
MAX_STEP_S = 60.0


class Lifecycle:
    """serving -> draining (new requests are refused) -> expired (running ones are ended).

    Mutable: it is the one place where the shutdown of the server is recorded. Used on the event loop only.
    """

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._expired = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._num_active = 0
        self.is_draining = False

    @property
    def is_idle(self) -> bool:
        return self._num_active == 0

    @property
    def is_stuck(self) -> bool:
        """The engine is in a step that does not end. Loading, restarting and draining are none."""
        return self._engine.seconds_since_step > MAX_STEP_S

    def begin_draining(self) -> None:
        self.is_draining = True

    def expire(self) -> None:
        """End the running requests now: raise_on_expiry() raises in each of them."""
        self.is_draining = True
        self._expired.set()

    def require_serving(self) -> None:
        """Raise EngineDraining, EngineLoading or EngineDied unless a request would be served now."""
        if self.is_draining or self._engine.state is EngineState.STOPPED:
            raise EngineDraining("the server is shutting down", retry_after_s=5)
        if self._engine.state is EngineState.LOADING:
            raise EngineLoading("the model is still loading", retry_after_s=2)
        if self._engine.state is EngineState.DEAD:
            raise EngineDied("the engine ended and is being restarted", retry_after_s=5)

    def require_healthy(self) -> None:
        """Like require_serving, and the engine must not be stuck in a step. Never waits for the engine."""
        self.require_serving()
        if self.is_stuck:
            raise EngineDied(f"the engine has finished no step for {self._engine.seconds_since_step:.0f} s")

    @contextmanager
    def running_request(self) -> Iterator[None]:
        """Admit one request and count it until it is answered; the drain waits for it."""
        self.require_serving()
        self._num_active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_active -= 1
            if self._num_active == 0:
                self._idle.set()

    async def wait_idle(self) -> None:
        await self._idle.wait()

    async def raise_on_expiry(self) -> NoReturn:
        await self._expired.wait()
        raise EngineDraining("the server is shutting down; this request ran out of time", retry_after_s=5)
