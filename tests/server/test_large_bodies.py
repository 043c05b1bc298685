"""Large bodies: what they may cost, how many are held at once, and that others are answered meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator

import orjson
import pytest
from starlette.types import Message
from support.http_server import World, read_until, serving

from forkpoint.configs.errors import RequestError
from forkpoint.server.errors import TooManyBodies
from forkpoint.server.request_body import MAX_COST, BodyReader

TOKENIZE = "/tokenize"


def receiving(*pieces: bytes) -> Callable[[], Awaitable[Message]]:
    """What an ASGI server gives for a body that arrives in these pieces."""
    left = list(pieces)

    async def receive() -> Message:
        await asyncio.sleep(0)
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    return receive


def reader(max_bytes: int = 32 * 2**20) -> BodyReader:
    return BodyReader(max_bytes=max_bytes, timeout_s=30)


SCOPE = {"type": "http", "headers": []}


@pytest.mark.parametrize("mark", [b"[", b"{},", b'"":1,', b"1,"])
def test_body_of_very_many_values_is_refused_before_it_is_parsed(mark: bytes) -> None:
    async def read() -> None:
        piece = mark * 50_000
        with pytest.raises(RequestError, match="too many JSON values") as caught:
            # It ends nowhere: what is refused is not read to its end.
            await reader().read(SCOPE, receiving(b"{", *[piece] * 40))
        assert caught.value.status == 400

    asyncio.run(read())


def test_body_at_the_bound_is_parsed() -> None:
    async def read() -> None:
        body = orjson.dumps({"tokens": [7] * (MAX_COST - 100), "text": "x" * 2**20})
        assert await reader().read(SCOPE, receiving(body)) == orjson.loads(body)

    asyncio.run(read())


def test_bodies_that_fill_the_memory_are_refused_and_small_ones_still_read() -> None:
    async def read() -> None:
        bodies = reader(max_bytes=100_000)
        whole = b'{"a": "' + b"x" * 90_000 + b'"}'
        ends = [asyncio.Event() for _ in range(8)]

        def held_back(end: asyncio.Event) -> Callable[[], Awaitable[Message]]:
            pieces = iter([whole[:-1], whole[-1:]])

            async def receive() -> Message:
                piece = next(pieces)
                if piece == b"}":
                    await end.wait()
                return {"type": "http.request", "body": piece, "more_body": piece != b"}"}

            return receive

        held = [asyncio.create_task(bodies.read(SCOPE, held_back(end))) for end in ends]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(TooManyBodies) as caught:
            await bodies.read(SCOPE, receiving(whole))
        assert caught.value.retry_after_s > 0
        assert await bodies.read(SCOPE, receiving(b'{"b": 1}')) == {"b": 1}
        for end in ends:
            end.set()
        await asyncio.gather(*held)
        # All that was held is given back, by those that were refused too.
        for _ in range(20):
            assert len(await bodies.read(SCOPE, receiving(whole))) == 1

    asyncio.run(read())


def test_event_loop_gets_half_of_the_time_while_many_large_bodies_are_parsed() -> None:
    async def read() -> None:
        bodies = reader()
        body = orjson.dumps({"tokens": [123456] * (MAX_COST - 100)})
        tasks = [asyncio.create_task(bodies.read(SCOPE, receiving(body))) for _ in range(6)]
        num_turns = 0
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            num_turns += 1
        assert num_turns > 1000  # and not one turn of the loop for each body

    asyncio.run(read())


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with serving(max_body_bytes=2**20) as world:
        yield world


def test_refusal_of_a_body_that_is_on_its_way_ends_the_connection(world: World) -> None:
    host, _, port = world.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        head = f"POST {TOKENIZE} HTTP/1.1\r\nHost: x\r\nContent-Length: {2**19 * 2}\r\n\r\n"
        connection.sendall(head.encode())
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"[" * 2**20)
        answer = read_until(connection, b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400") and b"connection: close" in answer.lower()


def test_text_full_of_brackets_is_taken(world: World) -> None:
    """Marks inside of strings count too, so the bound lies beyond every text that fits a context."""
    assert world.http.post(TOKENIZE, json={"prompt": "[{,:" * 500}).status_code == 200
