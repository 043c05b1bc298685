"""The API process's side of every running request: hands step messages to mailboxes, bounds the queue."""

from __future__ import annotations

from collections.abc import Callable

from forkpoint.configs.errors import QueueFull
from forkpoint.scheduler.client import TokenMailbox
from forkpoint.scheduler.messages import EngineStats, Finish, StepTokens


class Mailboxes:
    """One mailbox per unfinished uid. Lives on the event loop; nothing here blocks.

    max_queued: unfinished requests allowed beyond those that the engine can run at once; None: no bound.
    """

    def __init__(self, *, max_queued: int | None) -> None:
        self.stats = EngineStats()
        self._max_queued = max_queued
        self._open: dict[int, TokenMailbox] = {}
        self._step_listeners: list[Callable[[StepTokens], None]] = []

    @property
    def num_open(self) -> int:
        return len(self._open)

    def on_step(self, listener: Callable[[StepTokens], None]) -> None:
        self._step_listeners.append(listener)

    def open(self, uid: int, *, max_running: int) -> TokenMailbox:
        """A mailbox for a new uid. Raises QueueFull."""
        if self._max_queued is not None and len(self._open) >= self._max_queued + max_running:
            raise QueueFull(
                f"{len(self._open)} requests are unfinished: {max_running} can run at once and "
                f"{self._max_queued} may wait (--max-queued-requests)"
            )
        mailbox = self._open[uid] = TokenMailbox(uid)
        return mailbox

    def close(self, uid: int) -> bool:
        """End a mailbox at once with `abort`; what the engine still says of it is dropped.

        False if there is none: the request ended before, or never was.
        """
        mailbox = self._open.pop(uid, None)
        if mailbox is not None:
            mailbox.put(finish=Finish(uid, "abort"))
        return mailbox is not None

    def deliver(self, step: StepTokens) -> None:
        """Hand out one step. A sequence's start, token and finish of one step arrive as one delta."""
        self.stats = step.stats
        for start in step.started:
            if (mailbox := self._open.get(start.uid)) is not None:
                mailbox.put(started=start)
        for scores in step.prompt_scores:
            if (mailbox := self._open.get(scores.uid)) is not None:
                mailbox.put(prompt_scores=(scores,))
        for uid, token in zip(step.uids, step.tokens, strict=True):
            if (mailbox := self._open.get(uid)) is None:
                continue
            if uid in step.logprobs:
                mailbox.put((token,), logprobs=step.logprobs[uid])
            else:
                mailbox.put_token(token)
        for finish in step.finished:
            if (mailbox := self._open.pop(finish.uid, None)) is not None:
                mailbox.put(finish=finish)
        for listener in self._step_listeners:
            listener(step)

    def fail_all(self, error: Exception) -> None:
        """The engine is gone: every open mailbox raises `error` after what it has."""
        for mailbox in self._open.values():
            mailbox.fail(error)
        self._open.clear()
        self.stats = EngineStats()
