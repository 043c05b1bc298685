"""Every error that Forkpoint raises on purpose, as one tree.

ForkpointError
├── ConfigError            a flag, an environment variable or a configuration file is wrong
├── ModelLoadError         a checkpoint cannot be served: missing tensor, unknown architecture, bad file
├── RequestError           one request is wrong; the server is fine (HTTP 4xx)
├── RemoteError            a server that a command talks to is not there, or refuses
└── EngineUnavailable      the server cannot take or finish a request now (HTTP 5xx or 429)
    ├── EngineLoading      weights are being loaded
    ├── EngineDied         the engine process ended; it is being restarted
    ├── EngineDraining     the server is shutting down
    └── QueueFull          --max-queued-requests are waiting
"""

from __future__ import annotations


class ForkpointError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(ForkpointError):
    """A setting is wrong. `hint` names the flag to change; the command line prints both and exits 2."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class ModelLoadError(ForkpointError):
    """A checkpoint cannot be served. `hint` says what to do about it."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class RequestError(ForkpointError):
    """One request is wrong; nothing else is affected.

    status: HTTP status (4xx). param: dotted path of the field (`messages.0.role`). code: OpenAI's short
    string (`context_length_exceeded`, `model_not_found`, ...), or None.
    """

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


class RemoteError(ForkpointError):
    """A server that a command talks to (`forkpoint chat`) is not there, or refuses. `hint`: what to do."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class EngineUnavailable(ForkpointError):
    """The server cannot take or finish this request now; `retry_after_s` becomes `Retry-After`."""

    status = 503
    code = "service_unavailable"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineLoading(EngineUnavailable):
    """Weights are still being loaded."""


class EngineDied(EngineUnavailable):
    """The engine process ended. A request that was running gets status 500, a new one 503."""


class EngineDraining(EngineUnavailable):
    """SIGTERM was received: running requests finish, new ones are refused."""


class QueueFull(EngineUnavailable):
    """--max-queued-requests requests are waiting already."""

    status = 429
    code = "rate_limit_exceeded"
