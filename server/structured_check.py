"""Asks a process of its own whether a grammar can be followed, before any request with it is queued."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import struct
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import structlog

from forkpoint.configs.errors import EngineUnavailable, RequestError

# An ordinary schema takes 1 to 10 ms, one of 2,000 properties a second on a slow machine.
CHECK_LIMIT_S = 5.0
# A vocabulary of 262,144 tokens takes 1 to 9 s to load, as busy as the machine is.
LOAD_LIMIT_S = 60.0
MAX_WAITING = 64
MAX_KEPT_ANSWERS = 1024

_log = structlog.stdlib.get_logger(__name__)


class GrammarChecks(Protocol):
    """Tells whether grammars (llguidance's JSON text) can be followed."""

    async def require(self, grammar: str, *, param: str) -> None:
        """Raise RequestError about the field `param` if not; EngineUnavailable if nobody can tell now."""
        ...

    async def lark_of(self, gbnf: str, *, param: str) -> str:
        """A grammar in llama.cpp's syntax as one in Lark's. Raises as require() does."""
        ...

    async def start(self) -> None:
        """Make ready for the first grammar. Without it the first one waits longer."""
        ...

    async def stop(self) -> None: ...


class NoGrammars:
    """GrammarChecks of a server that cannot follow any."""

    async def require(self, grammar: str, *, param: str) -> None:
        raise RequestError(f"{param} cannot be followed: this server has no grammars", param=param)

    async def lark_of(self, gbnf: str, *, param: str) -> str:
        raise RequestError(f"{param} cannot be followed: this server has no grammars", param=param)

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass


class WorkerGrammarChecks:
    """GrammarChecks by one process, one grammar after the other; killed when one takes too long.

    Answers are kept, so that a grammar is compiled once whatever the number of requests that use it.
    """

    def __init__(self, command: Sequence[str], *, check_limit_s: float = CHECK_LIMIT_S) -> None:
        """command: starts forkpoint.scheduler.grammar_worker for the model."""
        self._command = command
        self._check_limit_s = check_limit_s
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._num_waiting = 0
        self._answers: OrderedDict[bytes, str] = OrderedDict()

    @property
    def is_busy(self) -> bool:
        """Whether a grammar is being compiled now, or the process is being started."""
        return self._turn.locked()

    async def require(self, grammar: str, *, param: str) -> None:
        await self._answer(f"?{grammar}", param)

    async def lark_of(self, gbnf: str, *, param: str) -> str:
        return await self._answer(f">{gbnf}", param)

    async def _answer(self, question: str, param: str) -> str:
        key = hashlib.blake2b(question.encode(), digest_size=32).digest()
        if key not in self._answers:
            if self._num_waiting >= MAX_WAITING:
                raise EngineUnavailable("too many grammars wait to be compiled")
            self._num_waiting += 1
            try:
                async with self._turn:
                    if key not in self._answers:
                        self._keep(key, await self._ask(question))
            finally:
                self._num_waiting -= 1
        answer = self._answers[key]
        self._answers.move_to_end(key)
        if answer.startswith("-"):
            raise RequestError(f"{param} cannot be followed: {answer[1:]}", param=param)
        return answer[1:]

    async def start(self) -> None:
        async with self._turn:
            with contextlib.suppress(RequestError, EngineUnavailable):  # the first request tries again
                await self._running_process()

    async def stop(self) -> None:
        """Kill the process. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _keep(self, key: bytes, answer: str) -> None:
        self._answers[key] = answer
        while len(self._answers) > MAX_KEPT_ANSWERS:
            self._answers.popitem(last=False)

    async def _ask(self, question: str) -> str:
        process = await self._running_process()
        try:
            return await asyncio.wait_for(_exchange(process, question), self._check_limit_s)
        except asyncio.TimeoutError:
            await self.stop()
            return f"-compiling it takes more than {self._check_limit_s:g} seconds"
        except (asyncio.IncompleteReadError, ConnectionError):
            await self.stop()
            return "-compiling it ended the process that did it"
        except BaseException:
            # Cancelled: the answer would be taken for that of the next grammar.
            await self.stop()
            raise

    async def _running_process(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                cwd="/",  # so that no file beside the user shadows a module
            )
            try:
                complaint = await asyncio.wait_for(_read_frame(self._process), LOAD_LIMIT_S)
            except (asyncio.TimeoutError, asyncio.IncompleteReadError) as error:
                await self.stop()
                raise EngineUnavailable("grammars cannot be compiled now") from error
            except BaseException:
                await self.stop()
                raise
            if complaint.startswith("-"):
                await self.stop()
                _log.warning("grammars_unavailable", reason=complaint[1:])
                raise RequestError(f"this model cannot follow grammars: {complaint[1:]}")
        return self._process


async def _exchange(process: asyncio.subprocess.Process, question: str) -> str:
    assert process.stdin is not None
    content = question.encode()
    process.stdin.write(struct.pack(">I", len(content)) + content)
    await process.stdin.drain()
    return await _read_frame(process)


async def _read_frame(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    (length,) = struct.unpack(">I", await process.stdout.readexactly(4))
    return (await process.stdout.readexactly(length)).decode("utf-8")
