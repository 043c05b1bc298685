"""What is asked: conversations of one turn or several, whose texts have the wanted numbers of tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from forkpoint.configs.bench_settings import BenchSettings
from forkpoint.server.bench.words import TextSource, text_rng

T = TypeVar("T")

# Texts that are made at the same time: each needs a few answers of /tokenize, one after the other.
_MAKERS = 8


@dataclass(frozen=True, slots=True)
class Conversation:
    """number: its place in the run. prefix: which system prompt it begins with; None: none.

    questions: one for each turn. Of a plain prompt (`is_plain`) there is one, and what is sent is
    system + question, as one text.
    """

    number: int
    prefix: int | None
    system: str
    questions: tuple[str, ...]
    is_plain: bool
    is_warmup: bool = False


async def make_conversations(settings: BenchSettings, texts: TextSource) -> list[Conversation]:
    """The warm-up's conversations first, then those that are measured. The same for the same seed."""
    seed = settings.seed
    total = settings.warmup_requests + settings.num_prompts
    prefixes: list[str] = []
    if settings.workload != "random" and settings.system_tokens > 0:
        prefixes = await _gather(
            [
                texts.extend(
                    "", settings.system_tokens, text_rng(seed, "system", index), is_whole_prompt=True
                )
                for index in range(settings.num_prefixes)
            ]
        )
    choice = text_rng(seed, "prefixes")
    weights = [(1 + index) ** -settings.zipf for index in range(len(prefixes))]
    chosen = choice.choices(range(len(prefixes)), weights, k=total) if prefixes else [None] * total

    async def make(number: int, prefix: int | None) -> Conversation:
        system = "" if prefix is None else prefixes[prefix]
        place = (seed, "question", number)
        if settings.workload == "chat":
            questions = [
                await texts.extend("", settings.question_tokens, text_rng(*place, turn))
                for turn in range(settings.turns)
            ]
        else:
            length = settings.question_tokens + (settings.system_tokens if system else 0)
            questions = [await texts.extend(system, length, text_rng(*place), is_whole_prompt=True)]
        return Conversation(
            number=number - settings.warmup_requests,
            prefix=prefix,
            system=system,
            questions=tuple(questions),
            is_plain=settings.workload != "chat",
            is_warmup=number < settings.warmup_requests,
        )

    return await _gather([make(number, prefix) for number, prefix in enumerate(chosen)])


def arrival_times(rate: float, burstiness: float, count: int, seed: int) -> Sequence[float]:
    """Seconds at which `count` requests begin, from 0 on. Gaps are gamma distributed with mean 1 / rate.

    burstiness: the distribution's shape; 1 makes it a Poisson process. rate inf: all at once.
    """
    rng = text_rng(seed, "arrivals")
    times, now_s = [], 0.0
    for _ in range(count):
        times.append(now_s)
        now_s += rng.gammavariate(burstiness, 1.0 / (rate * burstiness)) if rate != float("inf") else 0.0
    return times


async def _gather(makers: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    turn = asyncio.Semaphore(_MAKERS)

    async def make(maker: Coroutine[Any, Any, T]) -> T:
        async with turn:
            return await maker

    return list(await asyncio.gather(*map(make, makers)))
