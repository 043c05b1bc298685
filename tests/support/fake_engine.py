"""A deterministic EngineClient without a model: the test says what is generated, and when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from support.text_doubles import VOCAB_SIZE

from forkpoint.cache.description import TreeDescription
from forkpoint.configs.errors import EngineDied, EngineLoading, QueueFull
from forkpoint.scheduler.client import EngineState, TokenMailbox
from forkpoint.scheduler.messages import (
    CacheDescribed,
    EngineInfo,
    EngineStats,
    Finish,
    LoadProgress,
    PoolStats,
    PromptScores,
    Started,
    StepTokens,
    Submit,
    TokenLogprobs,
)

Reply = Callable[[Submit], Iterator[int]]

INFO = EngineInfo(
    context_length=2048,
    vocab_size=VOCAB_SIZE,
    page_size=16,
    full_tokens=4096,
    swa_tokens=2048,
    window=64,
    margin=16,
    max_running_requests=256,
    chunked_prefill_size=256,
    dtype="float32",
    device="cpu",
    attention_backend="torch",
    layer_pattern="SF",
    num_parameters=1,
)


def echo(submit: Submit) -> Iterator[int]:
    """Repeats the bytes of the prompt for ever."""
    while True:
        yield from (int(token) for token in submit.token_ids if token < 256)


def says(text: str | bytes, *ending: int) -> Reply:
    """Says this text byte by byte, then the ending tokens, then dots for ever."""

    def reply(submit: Submit) -> Iterator[int]:
        yield from text if isinstance(text, bytes) else text.encode()
        yield from ending
        while True:
            yield ord(".")

    return reply


def token_logprobs(tokens: list[int], num_top: int) -> TokenLogprobs:
    """Of token t: -t / 256, and -inf of byte 0. The likeliest are t, t + 1, ... with 0, -1, ... and -inf."""
    values = np.array([-np.inf if token == 0 else -token / 256 for token in tokens], dtype=np.float32)
    ids = [[(token + i) % VOCAB_SIZE for i in range(num_top)] for token in tokens]
    tops = [[-np.inf if i == num_top - 1 else -float(i) for i in range(num_top)] for _ in tokens]
    shape = (len(tokens), num_top)
    return TokenLogprobs(
        values, np.array(ids, dtype=np.int32).reshape(shape), np.array(tops, dtype=np.float32).reshape(shape)
    )


def prompt_scores(submit: Submit) -> Iterator[PromptScores]:
    """In pieces of three tokens."""
    tokens = submit.token_ids.tolist()
    for start in range(1, len(tokens), 3):
        logprobs = token_logprobs(tokens[start : start + 3], submit.params.num_logprobs or 0)
        yield PromptScores(submit.uid, start, logprobs)


@dataclass
class _Sequence:
    submit: Submit
    mailbox: TokenMailbox
    tokens: Iterator[int]
    num_tokens: int = 0


@dataclass
class FakeEngine:
    """Steps by itself, one token per sequence and turn of the event loop, unless it is held.

    A held engine steps when step() is called. Tests run in another thread than the event loop: they call
    step(), die(), ... and wait with until(); all of these are thread-safe.
    """

    reply: Reply = echo
    info: EngineInfo | None = INFO
    state: EngineState = EngineState.READY
    stats: EngineStats = field(default_factory=EngineStats)
    num_restarts: int = 0
    seconds_since_step: float = 0.0
    cached_tokens: int = 0
    rebuilt_tokens: int = 0
    max_queued: int = 1024
    steps_per_turn: int = 1  # more: the tokens of several steps reach the reader merged
    is_held: bool = False
    is_admitting: bool = True
    submits: list[Submit] = field(default_factory=list)
    aborts: list[int] = field(default_factory=list)
    num_flushes: int = 0
    tree: TreeDescription = TreeDescription((), 0, 0, 0)
    described_max_nodes: list[int] = field(default_factory=list)
    load_error: Exception | None = None

    def __post_init__(self) -> None:
        self._news = threading.Condition(threading.RLock())
        self._sequences: dict[int, _Sequence] = {}
        self._waiting: list[_Sequence] = []
        self._listeners: list[Callable[[StepTokens], None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_scheduled = False

    # ---- what the server calls, on the event loop

    def on_step(self, listener: Callable[[StepTokens], None]) -> None:
        self._listeners.append(listener)

    def on_progress(self, listener: Callable[[LoadProgress], None]) -> None:
        pass

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()

    async def wait_ready(self) -> EngineInfo:
        while self.info is None or self.state is EngineState.LOADING:
            await asyncio.sleep(0.01)
            if self.load_error is not None:
                raise self.load_error
        return self.info

    def submit(self, submit: Submit) -> TokenMailbox:
        self._loop = asyncio.get_running_loop()
        if self.state is EngineState.LOADING:
            raise EngineLoading("the model is still loading")
        if self.state is not EngineState.READY:
            raise EngineDied("the engine ended")
        if len(self._waiting) >= self.max_queued:
            raise QueueFull(f"{self.max_queued} requests are waiting", retry_after_s=3)
        mailbox = TokenMailbox(submit.uid)
        with self._news:
            self.submits.append(submit)
            self._waiting.append(_Sequence(submit, mailbox, self.reply(submit)))
            self._changed()
        self._schedule()
        return mailbox

    def abort(self, uid: int) -> None:
        with self._news:
            self._waiting = [waiting for waiting in self._waiting if waiting.submit.uid != uid]
            running = self._sequences.pop(uid, None)
            self.aborts.append(uid)
            if running is not None:
                running.mailbox.put(finish=Finish(uid, "abort"))
            self._changed()

    async def flush_cache(self) -> bool:
        with self._news:
            if self._sequences or self._waiting:
                return False
            self.num_flushes += 1
            return True

    async def describe_cache(self, max_nodes: int) -> CacheDescribed:
        if self.state is not EngineState.READY:
            raise EngineLoading("the engine is not ready")
        self.described_max_nodes.append(max_nodes)
        return CacheDescribed(0, self.tree, self.stats)

    async def stop(self) -> None:
        self.state = EngineState.STOPPED
        for sequence in self._sequences.values():
            sequence.mailbox.fail(EngineDied("the engine was stopped"))

    # ---- what tests call, from their own thread

    def until(self, condition: Callable[[], object], timeout_s: float = 10.0) -> None:
        """Wait until something is true of this engine."""
        with self._news:
            assert self._news.wait_for(condition, timeout_s), "the engine did not come to this in time"

    @property
    def num_running(self) -> int:
        return len(self._sequences)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def step(self, num_steps: int = 1) -> None:
        """Let a held engine do this many steps."""
        self._call(lambda: self.step_here(num_steps))

    def step_here(self, num_steps: int = 1) -> None:
        """step() for a test that runs on the event loop itself."""
        for _ in range(num_steps):
            self._step()

    def release(self) -> None:
        self.is_held = False
        self._call(self._schedule)

    def die(self) -> None:
        """The engine process ends: everything in it fails."""

        def die() -> None:
            self.state = EngineState.DEAD
            for sequence in [*self._sequences.values(), *self._waiting]:
                sequence.mailbox.fail(EngineDied("the engine ended", retry_after_s=5))
            self._sequences, self._waiting = {}, []

        self._call(die)

    def restart(self) -> None:
        def restart() -> None:
            self.num_restarts += 1
            self.stats = EngineStats()
            self.state = EngineState.READY

        self._call(restart)

    def fail_sequence(self, uid: int, message: str, *, is_own_fault: bool = False) -> None:
        """One step fails for one sequence."""
        finish = Finish(uid, "error", message=message, is_own_fault=is_own_fault)
        self._call(lambda: self._sequences.pop(uid).mailbox.put(finish=finish))

    def _call(self, action: Callable[[], object]) -> None:
        assert self._loop is not None
        done = threading.Event()

        def run() -> None:
            with self._news:
                action()
                self._changed()
            done.set()

        self._loop.call_soon_threadsafe(run)
        assert done.wait(10.0)

    # ---- the engine itself

    def _schedule(self) -> None:
        if self._loop is not None and not self.is_held and not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._is_scheduled = False
        if not self.is_held:
            for _ in range(self.steps_per_turn):
                self._step()
            if self._sequences:
                self._schedule()

    def _step(self) -> None:
        if self.state is not EngineState.READY:
            return
        with self._news:
            started = self._admit()
            num_prefill_rows = sum(
                len(each.submit.token_ids) for each in self._sequences.values() if not each.num_tokens
            )
            for uid, sequence in list(self._sequences.items()):
                if sequence.submit.params.max_tokens == 0:
                    sequence.mailbox.put(started=started.get(uid), finish=Finish(uid, "length"))
                    del self._sequences[uid]
            tokens = {uid: next(sequence.tokens) for uid, sequence in self._sequences.items()}
            finishes = {
                uid: finish
                for uid, token in tokens.items()
                if (finish := self._finish_of(uid, token)) is not None
            }
            for uid, token in tokens.items():
                num_top = self._sequences[uid].submit.params.num_logprobs
                self._sequences[uid].mailbox.put(
                    (token,),
                    started=started.get(uid),
                    finish=finishes.get(uid),
                    logprobs=None if num_top is None else token_logprobs([token], num_top),
                )
            for uid in finishes:
                del self._sequences[uid]
            self._report(tokens, started, finishes, num_prefill_rows)
            self._changed()

    def _admit(self) -> dict[int, Started]:
        if not self.is_admitting:
            return {}
        admitted, self._waiting = self._waiting, []
        for sequence in admitted:
            self._sequences[sequence.submit.uid] = sequence
            if sequence.submit.params.scores_prompt:
                for scores in prompt_scores(sequence.submit):
                    sequence.mailbox.put(prompt_scores=(scores,))
        return {
            uid: Started(uid, self.cached_tokens, self.rebuilt_tokens, 0.25)
            for uid in (sequence.submit.uid for sequence in admitted)
        }

    def _finish_of(self, uid: int, token: int) -> Finish | None:
        sequence = self._sequences[uid]
        sequence.num_tokens += 1
        if token in sequence.submit.params.stop_token_ids:
            return Finish(uid, "stop", stop_token_id=token)
        if sequence.num_tokens == sequence.submit.params.max_tokens:
            return Finish(uid, "length")
        return None

    def _report(
        self,
        tokens: dict[int, int],
        started: dict[int, Started],
        finishes: dict[int, Finish],
        num_prefill_rows: int,
    ) -> None:
        num_prompt_tokens = sum(len(self.submits_by_uid[uid].token_ids) for uid in started)
        self.stats = self.stats._replace(
            running=len(self._sequences),
            waiting=len(self._waiting),
            full=PoolStats(free=3000, tree=1000, locked=200, leased=96, capacity=4096),
            swa=PoolStats(free=1024, tree=512, locked=256, leased=512, capacity=2048),
            num_steps=self.stats.num_steps + 1,
            prompt_tokens=self.stats.prompt_tokens + num_prompt_tokens,
            cached_tokens=self.stats.cached_tokens + self.cached_tokens * len(started),
            generation_tokens=self.stats.generation_tokens + len(tokens),
        )
        step = StepTokens(
            uids=list(tokens),
            tokens=list(tokens.values()),
            started=tuple(started.values()),
            finished=tuple(finishes.values()),
            stats=self.stats,
            step_s=0.003,
            num_prefill_rows=num_prefill_rows,
            num_decode_rows=len(tokens) - len(started),
        )
        for listener in self._listeners:
            listener(step)

    @property
    def submits_by_uid(self) -> dict[int, Submit]:
        return {submit.uid: submit for submit in self.submits}

    def _changed(self) -> None:
        self._news.notify_all()
