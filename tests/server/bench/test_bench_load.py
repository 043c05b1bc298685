"""How `forkpoint bench` asks: closed and open loops, turns in order, failures, lengths of texts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from forkpoint.configs.bench_settings import BenchSettings
from forkpoint.server.bench.load import Load
from forkpoint.server.bench.record import Answer
from forkpoint.server.bench.words import CountedTexts, ScaledTexts, measure_pieces, text_rng
from forkpoint.server.bench.workload import Conversation, make_conversations


class Clock:
    """A clock that stands still but when somebody sleeps. Mutable."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        target = self.now_s + seconds
        await asyncio.sleep(0)
        self.now_s = max(self.now_s, target)


class Server:
    """Answers after some turns of the event loop; knows how many asked at once. Mutable."""

    def __init__(self, *, fails: int | None = None) -> None:
        self.at_once = self.most = 0
        self.asked: list[tuple[int, tuple[tuple[str, str], ...]]] = []
        self._fails = fails

    async def answer(self, conversation: Conversation, history: Sequence[tuple[str, str]]) -> Answer:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        self.asked.append((conversation.number, tuple(history)))
        for _ in range(3):
            await asyncio.sleep(0)
        self.at_once -= 1
        if conversation.number == self._fails:
            return Answer(error="no")
        return Answer(text=f"answer {len(history)}", ttft_s=0.1, last_s=0.2, output_tokens=2)


def conversations(count: int, *, turns: int = 1) -> list[Conversation]:
    questions = tuple(f"question {turn}" for turn in range(turns))
    return [Conversation(number, None, "", questions, is_plain=turns == 1) for number in range(count)]


@pytest.mark.parametrize(("count", "concurrency"), [(9, 4), (2, 8), (5, 1)])
def test_a_closed_loop_keeps_so_many_under_way(count: int, concurrency: int) -> None:
    server = Server()
    load = Load(server, 2)
    asyncio.run(load.closed(conversations(count), concurrency))
    assert server.most == min(count, concurrency)
    assert sorted(record.conversation for record in load.run.records) == list(range(count))


def test_an_open_loop_asks_at_the_planned_times_whatever_is_under_way() -> None:
    clock, server = Clock(), Server()
    load = Load(server, 2, clock=clock, sleep=clock.sleep)
    asyncio.run(load.open(conversations(4), [0.0, 0.5, 2.0, 2.0], None))
    records = sorted(load.run.records, key=lambda record: record.conversation)
    assert [record.start_s for record in records] == pytest.approx([0.0, 0.5, 2.0, 2.0], abs=2.0)
    assert all(
        record.lag_s == record.start_s - at_s for record, at_s in zip(records, [0, 0.5, 2, 2], strict=True)
    )
    limited = Server()
    asyncio.run(Load(limited, 2).open(conversations(6), [0.0] * 6, 2))
    assert limited.most == 2


def test_a_chat_goes_on_with_the_servers_own_answers_and_ends_where_one_fails() -> None:
    server = Server(fails=1)
    load = Load(server, 2)
    asyncio.run(load.closed(conversations(2, turns=3), 1))
    assert [history for number, history in server.asked if number == 0] == [
        (),
        (("question 0", "answer 0"),),
        (("question 0", "answer 0"), ("question 1", "answer 1")),
    ]
    assert [(record.conversation, record.turn) for record in load.run.records] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
    ]


def test_who_stops_a_load_gets_what_was_recorded() -> None:
    async def story() -> Load:
        load = Load(Server(), 2)
        task = asyncio.ensure_future(load.closed(conversations(10_000), 1))
        while len(load.run.records) < 5:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return load

    run = asyncio.run(story()).run
    assert run.was_stopped and len(run.records) >= 5


# ---- texts


async def count_letters(text: str, *, is_whole_prompt: bool) -> int:
    """A tokenizer of three letters a token, with one token before a prompt."""
    return -(-len(text) // 3) + is_whole_prompt


async def count_words(text: str, *, is_whole_prompt: bool) -> int:
    return len(text.split()) + is_whole_prompt


@pytest.mark.parametrize("count", [count_letters, count_words])
@pytest.mark.parametrize("workload", ["shared-prefix", "random", "chat"])
def test_texts_have_the_wanted_lengths_and_shared_beginnings(count: object, workload: str) -> None:
    settings = BenchSettings(
        workload=workload,  # type: ignore[arg-type]
        system_tokens=60, question_tokens=25, num_prompts=12, num_prefixes=3, turns=2, warmup_requests=2,
    )  # fmt: skip

    async def make(seed: int) -> tuple[bool, list[Conversation]]:
        from dataclasses import replace

        texts = CountedTexts(count, await measure_pieces(count))  # type: ignore[arg-type]
        made = await make_conversations(replace(settings, seed=seed), texts)
        for each in made:
            whole = each.system + each.questions[0]
            if workload == "chat":
                lengths = [await count(text, is_whole_prompt=False) for text in each.questions]  # type: ignore[operator]
                assert lengths == [25, 25]
            else:
                wanted = 85 if workload == "shared-prefix" else 25
                assert await count(whole, is_whole_prompt=True) == wanted  # type: ignore[operator]
        return texts.is_exact, made

    is_exact, made = asyncio.run(make(5))
    assert is_exact and len(made) == 14
    assert [each.is_warmup for each in made] == [True] * 2 + [False] * 12
    assert len({each.questions for each in made}) == 14, "no two ask the same"
    systems = {each.system for each in made}
    assert systems == {""} if workload == "random" else 1 < len(systems) <= 3
    assert asyncio.run(make(5)) == (True, made), "the same seed asks the same"
    others = asyncio.run(make(6))[1]
    beginnings = {(each.system + each.questions[0])[:12] for each in made}
    assert not beginnings & {(each.system + each.questions[0])[:12] for each in others}


def test_popular_prefixes_come_more_often() -> None:
    texts = ScaledTexts(1.0, 0.0)

    def chosen(zipf: float) -> list[int]:
        settings = BenchSettings(
            num_prompts=400, num_prefixes=4, system_tokens=8, question_tokens=4, zipf=zipf
        )
        made = asyncio.run(make_conversations(settings, texts))
        return [sum(each.prefix == prefix for each in made) for prefix in range(4)]

    one, two, three, four = chosen(1.5)
    assert one > two > three > four > 0
    assert max(chosen(0.0)) < 1.6 * min(chosen(0.0))


def test_places_of_texts_that_are_near_have_nothing_in_common() -> None:
    assert text_rng(1, "a", 2).random() != text_rng(1, "a", 3).random() != text_rng(2, "a", 2).random()
