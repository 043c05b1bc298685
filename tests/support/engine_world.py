"""The whole engine over the checking runner: random requests, chunks, aborts and tight pools, all audited."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import numpy as np
from support.cache_world import random_anchors
from support.checking_runner import CheckingRunner, expected_continuation, expected_scores

from forkpoint.cache import CacheGeometry, PrefixCache
from forkpoint.cache.pages import num_pages_for
from forkpoint.configs.sampling import SamplingParams
from forkpoint.configs.staircase import Staircase
from forkpoint.model.inputs import Kind
from forkpoint.scheduler.constraint import Compilations
from forkpoint.scheduler.engine import Engine
from forkpoint.scheduler.limits import RESERVED_DECODE_TOKENS, SchedulerLimits
from forkpoint.scheduler.messages import Abort, EngineInfo, Finish, FlushCache, FlushDone, StepTokens, Submit
from forkpoint.scheduler.scheduler import Scheduler

VOCAB_SIZE = 1000


@dataclass
class Story:
    """What one request asked for and got so far."""

    prompt: list[int]
    max_tokens: int
    stop_token_ids: frozenset[int]
    namespace: str
    tokens: list[int]
    cached_tokens: int | None = None
    rebuilt_tokens: int | None = None
    finish: Finish | None = None
    was_aborted: bool = False
    num_logprobs: int | None = None
    scores_prompt: bool = False
    prompt_scores: list[float] = field(default_factory=list)


class EngineWorld:
    """An engine whose every read, ledger and answer is checked."""

    def __init__(
        self,
        geometry: CacheGeometry,
        *,
        full_pages: int,
        swa_pages: int,
        max_rows: int,
        max_running: int = 8,
        context_length: int = 100_000,
        retention: str = "branch",
        eviction: str = "lru",
        enabled: bool = True,
        reserved_decode_tokens: int = RESERVED_DECODE_TOKENS,
        pattern: str = "SF",
        rebuilds: bool = True,
        tile: int = 1,
        compilations: Compilations | None = None,
    ) -> None:
        staircase = None
        if rebuilds and geometry.window is not None:
            staircase = Staircase(pattern, geometry.window, geometry.page_size, tile)
        self.geometry = geometry
        self.limits = SchedulerLimits(
            geometry,
            context_length=context_length,
            max_rows=max_rows,
            max_running=max_running,
            full_pages=full_pages,
            swa_pages=swa_pages,
            reserved_decode_tokens=reserved_decode_tokens,
            chunk_grid=math.lcm(tile, geometry.page_size),
        )
        self.cache = PrefixCache(
            geometry,
            full_pages=full_pages,
            swa_pages=swa_pages,
            retention=retention,
            eviction=eviction,
            enabled=enabled,
            staircase=staircase,
        )
        kinds: tuple[Kind, ...] = ("full",) if geometry.window is None else ("full", "swa")
        capacity: dict[Kind, int] = {"full": full_pages, "swa": swa_pages}
        self.runner = CheckingRunner(
            {kind: capacity[kind] + 1 for kind in kinds},
            page_size=geometry.page_size,
            window=geometry.window,
            vocab_size=VOCAB_SIZE,
            pattern=pattern,
        )
        self.time_s = 0.0
        self.scheduler = Scheduler(
            self.cache, self.limits, compilations=compilations, clock=lambda: self.time_s
        )
        self.engine = Engine(
            self.scheduler, self.runner, kinds=kinds, info=_info(self.limits), clock=lambda: self.time_s
        )
        self.stories: dict[int, Story] = {}
        self.num_steps = 0

    def submit(
        self,
        prompt: list[int],
        max_tokens: int = 8,
        *,
        stop_token_ids: frozenset[int] = frozenset(),
        namespace: str = "",
        choice: int = 0,
        anchors: tuple[int, ...] = (),
        num_logprobs: int | None = None,
        scores_prompt: bool = False,
    ) -> int:
        uid = len(self.stories)
        params = SamplingParams(
            seed=uid,
            max_tokens=max_tokens,
            temperature=0.0,
            stop_token_ids=stop_token_ids,
            num_logprobs=num_logprobs,
            scores_prompt=scores_prompt,
        )
        self.stories[uid] = Story(
            prompt,
            max_tokens,
            stop_token_ids,
            namespace,
            [],
            num_logprobs=num_logprobs,
            scores_prompt=scores_prompt,
        )
        self.engine.handle(Submit(uid, np.array(prompt, dtype=np.int32), params, choice, namespace, anchors))
        return uid

    def abort(self, uid: int) -> None:
        self.stories[uid].was_aborted = True
        self.engine.handle(Abort(uid))
        self.check()

    def step(self) -> StepTokens:
        self.time_s += 1.0
        report = self.engine.step()
        if self.runner.failure is not None:
            raise self.runner.failure
        self.num_steps += 1
        self._take(report)
        self.check()
        return report

    def run(self, *, max_steps: int = 10_000) -> None:
        """Step until nothing is left; a livelock fails."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                self.step()  # collects what ended between steps
                return
            self.step()
        raise AssertionError(f"still at work after {max_steps} steps")

    def _take(self, report: StepTokens) -> None:
        for start in report.started:
            story = self.stories[start.uid]
            assert start.cached_tokens + start.rebuilt_tokens < len(story.prompt)
            assert start.cached_tokens >= (story.cached_tokens or 0), "usage shrinks"
            assert start.rebuilt_tokens >= (story.rebuilt_tokens or 0), "usage shrinks"
            story.cached_tokens, story.rebuilt_tokens = start.cached_tokens, start.rebuilt_tokens
        for scores in report.prompt_scores:
            story = self.stories[scores.uid]
            assert story.scores_prompt and not story.tokens, "scores come before tokens"
            assert scores.start == 1 + len(story.prompt_scores), "a piece is missing, or sent twice"
            assert scores.logprobs.top_ids.shape == (len(scores.logprobs), story.num_logprobs or 0)
            story.prompt_scores += scores.logprobs.token_logprobs.tolist()
        assert len(set(report.uids)) == len(report.uids)
        asked = {uid for uid in report.uids if self.stories[uid].num_logprobs is not None}
        assert report.logprobs.keys() == asked
        for uid, token in zip(report.uids, report.tokens, strict=True):
            story = self.stories[uid]
            assert story.finish is None and story.cached_tokens is not None
            if story.scores_prompt:
                assert story.prompt_scores == expected_scores(story.prompt)
            story.tokens.append(token)
        for finish in report.finished:
            assert self.stories[finish.uid].finish is None, "finished twice"
            self.stories[finish.uid].finish = finish
            self._check_end(self.stories[finish.uid], finish)

    def _check_end(self, story: Story, finish: Finish) -> None:
        expected = expected_continuation(story.prompt, len(story.tokens), VOCAB_SIZE)
        assert story.tokens == expected, "the answer depends on cache, chunks or neighbours"
        if finish.reason == "stop":
            assert story.tokens[-1] in story.stop_token_ids and finish.stop_token_id == story.tokens[-1]
        elif finish.reason == "length":
            assert len(story.tokens) <= story.max_tokens
            if story.scores_prompt:
                assert story.prompt_scores == expected_scores(story.prompt)
        elif finish.reason == "abort":
            assert story.was_aborted
        else:
            assert finish.message and "slots" in finish.message or "tokens" in str(finish.message), finish
        early = story.tokens if finish.reason != "stop" else story.tokens[:-1]
        assert not set(early) & story.stop_token_ids or finish.reason in ("error",)

    def check(self) -> None:
        self.cache.audit()
        size = self.geometry.page_size
        for sequence in self.scheduler.running:
            assert sequence.lease is not None
            held = sequence.lease.num_held_swa_pages * size
            assert held <= self.geometry.max_resting_swa_tokens()
        assert self.scheduler.num_running <= self.limits.max_running

    def flush(self) -> bool:
        answer = self.engine.handle(FlushCache(0))
        assert isinstance(answer, FlushDone)
        return answer.cleared

    def finish_all(self) -> None:
        """Run dry, flush, and find every page of both pools free."""
        self.run()
        assert all(story.finish is not None for story in self.stories.values()), "a request has no end"
        assert self.flush()
        assert self.cache.full_use.free == self.cache.full_use.capacity
        swa = self.cache.swa_use
        assert swa is None or swa.free == swa.capacity
        stats = self.engine.stats()
        assert stats.prompt_tokens == stats.cached_tokens + stats.rebuilt_tokens + stats.computed_tokens


def _info(limits: SchedulerLimits) -> EngineInfo:
    geometry = limits.geometry
    return EngineInfo(
        context_length=limits.context_length,
        vocab_size=VOCAB_SIZE,
        page_size=geometry.page_size,
        full_tokens=limits.full_pages * geometry.page_size,
        swa_tokens=limits.swa_pages * geometry.page_size,
        window=geometry.window,
        margin=geometry.margin,
        max_running_requests=limits.max_running,
        chunked_prefill_size=limits.max_rows,
        dtype="none",
        device="none",
        attention_backend="checking",
        layer_pattern="SF",
        num_parameters=0,
    )


def random_engine(rng: random.Random) -> EngineWorld:
    """Small, odd and often tight; always large enough for one request at a time."""
    geometry = CacheGeometry(rng.choice([1, 1, 1, 2, 4, 5, 16, 32]), rng.choice([None, 1, 2, 4, 6, 9, 16]))
    size = geometry.page_size
    least_swa = num_pages_for((geometry.window or 1) + geometry.margin + 2 * size, size)
    return EngineWorld(
        geometry,
        full_pages=num_pages_for(rng.choice([150, 300, 600, 2000]), size),
        swa_pages=least_swa + rng.choice([0, 1, num_pages_for(30, size), num_pages_for(300, size)]),
        max_rows=rng.choice([1, 3, 8, 17, 64, 300]),
        max_running=rng.choice([1, 3, 8, 20]),
        context_length=rng.choice([120, 100_000]),
        retention=rng.choice(["anchors", "anchors", "branch", "tail"]),
        eviction=rng.choice(["cost", "cost", "lru"]),
        enabled=rng.random() > 0.1,
        reserved_decode_tokens=rng.choice([0, 0, 32]),
        pattern=rng.choice(["SF", "FS", "SSF", "SFS", "SFSFSS", "SFSFSS"]),
        rebuilds=rng.random() < 0.75,
        tile=rng.choice([1, 1, 1, 4, 16]),
    )


def random_engine_step(world: EngineWorld, rng: random.Random) -> None:
    """Submit, abort, flush or step."""
    unfinished = [uid for uid, story in world.stories.items() if story.finish is None]
    roll = rng.random()
    if roll < 0.18 and len(unfinished) < 30:
        _submit_random(world, rng)
    elif roll < 0.22 and unfinished:
        world.abort(rng.choice(unfinished))
    elif roll < 0.23:
        busy = world.engine.has_work
        assert world.flush() == (not busy)
    else:
        world.step()


def _submit_random(world: EngineWorld, rng: random.Random) -> None:
    recent = list(world.stories.values())[-20:]
    base: list[int] = []
    namespace = rng.choice(["", "", "", "salt:a"])
    if recent and rng.random() < 0.8:
        story = rng.choice(recent)
        base, namespace = story.prompt + story.tokens, story.namespace
        base = (
            base[: rng.randint(0, len(base))]
            if rng.random() < 0.6
            else base[: max(0, len(base) - rng.randint(0, 5))]
        )
    tail = [rng.randint(0, 2) for _ in range(rng.choice([1, 2, 10, 40, 90]))]
    stop = frozenset(range(60)) if rng.random() < 0.3 else frozenset()
    scores_prompt = rng.random() < 0.15
    world.submit(
        base + tail,
        rng.choice([1, 2, 5, 20, 60, 130, *[0] * 3 * scores_prompt]),
        stop_token_ids=stop,
        namespace=namespace,
        choice=rng.randint(0, 3),
        anchors=random_anchors(len(base + tail), rng),
        num_logprobs=rng.choice([None, None, 0, 3]),
        scores_prompt=scores_prompt,
    )
