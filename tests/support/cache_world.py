"""Sequences that live through the cache's verbs, with checked page contents; for hypothesis and fuzzing."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from support.cache_oracle import PageMemory, Tokens, assert_matches_oracle

from forkpoint.cache import CacheGeometry, Lease, OutOfPages, PrefixCache
from forkpoint.configs.staircase import Staircase


@dataclass
class Running:
    """One sequence between acquire and release. Mutable: it computes and grows."""

    tokens: list[int]
    namespace: str
    prompt_len: int
    lease: Lease
    num_computed: int

    @property
    def array(self) -> Tokens:
        return np.array(self.tokens, dtype=np.int32)


class CacheWorld:
    """A cache, its memory and the running sequences; audits after every operation."""

    def __init__(
        self,
        geometry: CacheGeometry,
        *,
        full_pages: int,
        swa_pages: int,
        retention: str = "branch",
        eviction: str = "lru",
        enabled: bool = True,
        pattern: str = "SF",
        rebuilds: bool = True,
        tile: int = 1,
    ) -> None:
        self.geometry = geometry
        staircase = None
        if rebuilds and geometry.window is not None:
            staircase = Staircase(pattern, geometry.window, geometry.page_size, tile)
        self.cache = PrefixCache(
            geometry,
            full_pages=full_pages,
            swa_pages=swa_pages,
            retention=retention,
            eviction=eviction,
            enabled=enabled,
            staircase=staircase,
        )
        self.memory = PageMemory(geometry, pattern, staircase)
        self.running: list[Running] = []
        self.seen: list[tuple[list[int], str]] = [([], "")]

    def start(self, tokens: list[int], namespace: str = "", anchors: tuple[int, ...] = ()) -> Running:
        array = np.array(tokens, dtype=np.int32)
        if self.cache.enabled:
            assert_matches_oracle(self.cache, array, namespace)
        match = self.cache.match(array, namespace)
        before = (self.cache.full_use, self.cache.swa_use, self.cache.dump())
        assert self.cache.match(array, namespace) == match
        assert (self.cache.full_use, self.cache.swa_use, self.cache.dump()) == before, (
            "match changed something"
        )
        assert match.resume_len <= match.full_len <= len(tokens) - 1
        lease = self.cache.acquire(match, prompt_len=len(tokens), anchors=anchors)
        running = Running(list(tokens), namespace, len(tokens), lease, lease.start)
        self.running.append(running)
        self.check()
        return running

    def compute(self, running: Running, num_rows: int) -> bool:
        """A prefill chunk, or one decoded token when the prompt is done. False when pages are short."""
        start = running.num_computed
        if start == len(running.tokens):
            return False
        end = min(len(running.tokens), start + num_rows)
        try:
            self.cache.extend(running.lease, end)
        except OutOfPages:
            self.check()
            return False
        tokens = running.array
        self.memory.compute(running.lease, tokens, start, end)
        running.num_computed = end
        if end > running.prompt_len:
            self.cache.advance(running.lease, end)
            self._check_resting_size(running)
        else:
            self.cache.commit(running.lease, tokens, end)
            self._check_resting_size(running)
        self.memory.check_window(running.lease, tokens, end)
        self.check()
        return True

    def _check_resting_size(self, running: Running) -> None:
        if self.geometry.window is not None:
            held = running.lease.num_held_swa_pages * self.geometry.page_size
            assert held <= self.geometry.max_resting_swa_tokens()

    def append(self, running: Running, token: int) -> None:
        """A sampled token: the sequence grows once everything before it is computed."""
        if running.num_computed == len(running.tokens):
            running.tokens.append(token)

    def finish(self, running: Running) -> None:
        self.running.remove(running)
        self.cache.release(running.lease, running.array, running.num_computed)
        self.seen.append((running.tokens[: running.num_computed], running.namespace))
        self.check()

    def flush(self) -> None:
        cleared = self.cache.flush()
        assert cleared == (not self.running)
        if cleared:
            self.assert_all_free()
        self.check()

    def assert_all_free(self) -> None:
        assert self.cache.full_use.free == self.cache.full_use.capacity
        if self.cache.swa_use is not None:
            assert self.cache.swa_use.free == self.cache.swa_use.capacity

    def drain(self) -> None:
        while self.running:
            self.finish(self.running[0])
        self.flush()

    def check(self) -> None:
        self.cache.audit()
        for running in self.running:
            self.memory.check_window(running.lease, running.array, running.num_computed)


def random_world(rng: random.Random) -> CacheWorld:
    page_size = rng.choice([1, 1, 2, 4, 5, 8, 16, 32])
    window = rng.choice([None, 1, 2, 4, 6, 9, 16])
    geometry = CacheGeometry(page_size, window)
    need = geometry.max_resting_swa_tokens() // page_size + 4
    return CacheWorld(
        geometry,
        full_pages=rng.randint(20, 160),
        swa_pages=rng.randint(need, 3 * need + 20),
        retention=rng.choice(["anchors", "anchors", "branch", "tail"]),
        eviction=rng.choice(["cost", "cost", "lru"]),
        enabled=rng.random() > 0.1,
        pattern=rng.choice(["SF", "FS", "SSF", "SFS", "SFSFSS", "SFSFSS", "S"]),
        rebuilds=rng.random() < 0.7,
        tile=rng.choice([1, 1, 1, 4, 16]),
    )


def random_prompt(world: CacheWorld, rng: random.Random) -> tuple[list[int], str]:
    """A fork of something seen before (often), with a random tail over a tiny alphabet."""
    base, namespace = rng.choice(world.seen)
    cut = rng.randint(0, len(base)) if rng.random() < 0.5 else max(0, len(base) - rng.randint(0, 6))
    tail = [rng.randint(0, 2) for _ in range(rng.randint(1, 40))]
    if rng.random() < 0.2:
        namespace = rng.choice(["", "salt:a", "salt:b"])
    return base[:cut] + tail, namespace


def random_anchors(length: int, rng: random.Random) -> tuple[int, ...]:
    return tuple(sorted({rng.randint(1, length) for _ in range(rng.randint(0, 4))}))


def random_step(world: CacheWorld, rng: random.Random) -> None:
    """One random operation of a random sequence."""
    roll = rng.random()
    if not world.running or (roll < 0.2 and len(world.running) < 6):
        tokens, namespace = random_prompt(world, rng)
        if len(tokens) > world.cache.full_use.capacity * world.geometry.page_size // 2:
            tokens = tokens[:20]
        world.start(tokens, namespace, random_anchors(len(tokens), rng))
    elif roll < 0.75:
        running = rng.choice(world.running)
        world.append(running, rng.randint(0, 2))
        if not world.compute(running, rng.choice([1, 1, 3, 7, 20, 64])) and rng.random() < 0.5:
            world.finish(rng.choice(world.running))
    elif roll < 0.97:
        world.finish(rng.choice(world.running))
    else:
        world.flush()
    if len(world.seen) > 40:
        del world.seen[1 : len(world.seen) - 30]
