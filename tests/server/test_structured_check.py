"""The process that checks grammars: answers, is killed when it takes too long, and comes back."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest
from text.tiny_tokenizers import byte_level

from forkpoint.configs.errors import EngineUnavailable, RequestError
from forkpoint.server.structured_check import MAX_WAITING, WorkerGrammarChecks

# Compiling it takes more than five minutes.
ENDLESS = {"allOf": [{"type": "integer", "multipleOf": 7919}, {"type": "integer", "multipleOf": 7907}]}


def grammar(schema: object) -> str:
    return json.dumps({"grammars": [{"json_schema": schema}]})


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    model_dir = tmp_path_factory.mktemp("model")
    tokenizer = byte_level()
    tokenizer.save(str(model_dir / "tokenizer.json"))
    sizes = [str(tokenizer.get_vocab_size()), str(tokenizer.token_to_id("<|im_end|>"))]
    return [sys.executable, "-m", "forkpoint.scheduler.grammar_worker", str(model_dir), *sizes]


def run(checks: WorkerGrammarChecks, work: Callable[[WorkerGrammarChecks], Awaitable[None]]) -> None:
    async def all_of_it() -> None:
        try:
            await work(checks)
        finally:
            await checks.stop()

    asyncio.run(all_of_it())


async def refusal(checks: WorkerGrammarChecks, schema: object) -> str:
    with pytest.raises(RequestError) as raised:
        await checks.require(grammar(schema), param="response_format")
    assert raised.value.param == "response_format"
    return str(raised.value)


def workers() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [child for child in children if "forkpoint.scheduler.grammar_worker" in child.cmdline()]


def test_good_grammars_pass_and_bad_ones_are_refused_with_the_reason(command: list[str]) -> None:
    async def work(checks: WorkerGrammarChecks) -> None:
        await checks.start()
        await checks.require(grammar({"type": "object"}), param="response_format")
        assert "uniqueItems" in await refusal(checks, {"type": "array", "uniqueItems": True})
        assert "cannot be followed" in await refusal(checks, {"$ref": "#"})
        assert await checks.lark_of('root ::= "a"', param="x") == '%llguidance {}\n\nstart: "a"\n'
        with pytest.raises(RequestError, match="GBNF"):
            await checks.lark_of('root ::= ("a"', param="x")
        await checks.require(grammar({"type": "string"}), param="response_format")

    run(WorkerGrammarChecks(command), work)
    assert workers() == []


def test_one_that_takes_for_ever_is_refused_and_the_next_is_served(command: list[str]) -> None:
    async def work(checks: WorkerGrammarChecks) -> None:
        await checks.start()
        (first,) = workers()
        endless, good = await asyncio.gather(
            refusal(checks, ENDLESS), checks.require(grammar({"type": "object"}), param="x")
        )
        assert "more than 1 seconds" in endless
        assert good is None
        (second,) = workers()
        assert second.pid != first.pid and not first.is_running()

    run(WorkerGrammarChecks(command, check_limit_s=1), work)
    assert workers() == []


def test_answers_are_kept_so_that_no_second_compilation_is_needed(command: list[str]) -> None:
    async def work(checks: WorkerGrammarChecks) -> None:
        await checks.require(grammar({"type": "object"}), param="x")
        first = await refusal(checks, {"type": "foo"})
        (worker,) = workers()
        worker.suspend()
        try:
            await checks.require(grammar({"type": "object"}), param="x")
            assert await refusal(checks, {"type": "foo"}) == first
        finally:
            worker.resume()

    run(WorkerGrammarChecks(command), work)


def test_a_process_that_dies_fails_one_grammar_and_is_started_again(command: list[str]) -> None:
    async def work(checks: WorkerGrammarChecks) -> None:
        await checks.start()
        (worker,) = workers()
        worker.suspend()
        pending = asyncio.ensure_future(refusal(checks, {"type": "object", "title": "a"}))
        await asyncio.sleep(0)
        worker.kill()
        assert "ended the process" in await pending
        await checks.require(grammar({"type": "object", "title": "b"}), param="x")

    run(WorkerGrammarChecks(command), work)


def test_a_cancelled_check_leaves_no_answer_for_the_next_one(command: list[str]) -> None:
    async def work(checks: WorkerGrammarChecks) -> None:
        await checks.start()
        pending = asyncio.ensure_future(checks.require(grammar(ENDLESS), param="x"))
        while not checks.is_busy:
            await asyncio.sleep(0)
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
        assert "foo" in await refusal(checks, {"type": "foo"})

    run(WorkerGrammarChecks(command), work)


def test_too_many_waiting_grammars_are_turned_away(command: list[str]) -> None:
    async def work(checks: WorkerGrammarChecks) -> None:
        waiting = [
            asyncio.ensure_future(checks.require(grammar({"title": str(i)}), param="x"))
            for i in range(MAX_WAITING)
        ]
        while not checks.is_busy:
            await asyncio.sleep(0)
        with pytest.raises(EngineUnavailable):
            await checks.require(grammar({"title": "one more"}), param="x")
        await asyncio.gather(*waiting)
        await checks.require(grammar({"title": "one more"}), param="x")

    run(WorkerGrammarChecks(command), work)


def test_a_model_without_a_tokenizer_refuses_every_grammar(tmp_path: Path, command: list[str]) -> None:
    async def work(checks: WorkerGrammarChecks) -> None:
        await checks.start()
        with pytest.raises(RequestError, match="cannot follow grammars"):
            await checks.require(grammar({"type": "object"}), param="x")

    run(WorkerGrammarChecks([*command[:3], str(tmp_path), *command[4:]]), work)
