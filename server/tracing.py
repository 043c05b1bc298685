"""What a tracer is told of each generation request. Off by default; OpenTelemetry is in tracing_otel.py."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from starlette.types import Scope

from forkpoint.server.generation import Generation, GenerationRequest


class RequestTrace(Protocol):
    """Follows one request, as a context around its whole life: errors that pass through it are recorded."""

    def checked(self, request: GenerationRequest) -> None:
        """The request passed every check."""
        ...

    def submitted(self, generation: Generation) -> None:
        """The engine has it. `generation` is read when the context ends, and must be closed by then."""
        ...

    def answering(self, response_id: str) -> None:
        """The id that the answer carries."""
        ...

    def failed(self, error: Exception) -> None:
        """An error that the client was told inside a stream, and that goes no further."""
        ...

    def __enter__(self) -> RequestTrace: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Tracing(Protocol):
    """Where traces go to."""

    def request(self, scope: Scope, request_id: str) -> RequestTrace:
        """Begin to follow a request that arrives now."""
        ...

    async def close(self) -> None:
        """Send what is not sent yet, within a bound. Nothing is traced after it."""
        ...


class NoTracing:
    """Follows nothing. One object is every request's trace, since it remembers nothing."""

    def request(self, scope: Scope, request_id: str) -> RequestTrace:
        return self

    async def close(self) -> None:
        pass

    def checked(self, request: GenerationRequest) -> None:
        pass

    def submitted(self, generation: Generation) -> None:
        pass

    def answering(self, response_id: str) -> None:
        pass

    def failed(self, error: Exception) -> None:
        pass

    def __enter__(self) -> NoTracing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass
