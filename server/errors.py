"""Turns every error into OpenAI's envelope: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from forkpoint.configs.errors import EngineUnavailable, ForkpointError, QueueFull, RequestError
from forkpoint.server.closing_response import ClosingResponse

MAX_MESSAGE_CHARS = 500  # at most 4 bytes each in UTF-8: a message never exceeds 2 KB on the wire

# Code of a body that was given up before its end.
TOO_MANY_VALUES = "too_many_values"

_INVALID_REQUEST = "invalid_request_error"
_SERVER_ERROR = "server_error"
_CODE_OF_STATUS = {404: "not_found", 405: "method_not_allowed"}


class GenerationFailed(ForkpointError):
    """A request that was running cannot be finished; the client gets status 500 or an error event."""


class GenerationRefused(GenerationFailed):
    """A request that was running turns out to ask for what cannot be done: the client's fault, status 400."""


class TooManyBodies(QueueFull):
    """A request is refused while its body is still on its way."""


class ClientGone(Exception):
    """The client closed the connection; nobody is left to answer."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """One error as it goes over the wire, as an HTTP response or as an event inside a stream."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    leaves_body_unread: bool = False

    @classmethod
    def of(cls, error: Exception) -> ErrorReply:
        """Translate; an error that is not one of ours says nothing about itself to the client."""
        if isinstance(error, RequestError):
            is_unauthorized = error.status == 401
            return cls(
                status=error.status,
                message=clip(str(error)),
                type="authentication_error" if is_unauthorized else _INVALID_REQUEST,
                param=error.param,
                code=error.code,
                headers={"WWW-Authenticate": "Bearer"} if is_unauthorized else {},
                leaves_body_unread=error.status in (408, 413) or error.code == TOO_MANY_VALUES,
            )
        if isinstance(error, EngineUnavailable):
            return cls(
                status=error.status,
                message=clip(str(error)),
                type="rate_limit_error" if error.status == 429 else _SERVER_ERROR,
                code=error.code,
                headers={"Retry-After": str(error.retry_after_s)},
                leaves_body_unread=isinstance(error, TooManyBodies),
            )
        if isinstance(error, HTTPException):  # raised by the router for unknown paths and wrong methods
            return cls(
                status=error.status_code,
                message=clip(error.detail),
                type=_SERVER_ERROR if error.status_code >= 500 else _INVALID_REQUEST,
                code=_CODE_OF_STATUS.get(error.status_code),
                headers=error.headers or {},
            )
        if isinstance(error, GenerationRefused):
            return cls(400, clip(str(error)), _INVALID_REQUEST, code="generation_failed")
        if isinstance(error, GenerationFailed):
            return cls(500, clip(str(error)), _SERVER_ERROR, code="generation_failed")
        return cls(
            500, "internal server error; the log has the details", _SERVER_ERROR, code="internal_error"
        )

    @property
    def envelope(self) -> dict[str, object]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        # Of a body that was not read to its end nothing may be taken for the next request.
        kind = ClosingResponse if self.leaves_body_unread else Response
        return kind(
            orjson.dumps(self.envelope),
            status_code=self.status,
            headers=dict(self.headers),
            media_type="application/json",
        )


def clip(text: str, limit: int = MAX_MESSAGE_CHARS) -> str:
    """`text`, cut to `limit` characters: a client's own huge input must not come back in an error."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


async def answer_error(request: Request, error: Exception) -> Response:
    """Exception handler of the app for every error that has a meaning in HTTP."""
    if isinstance(error, HTTPException) and error.status_code in _CODE_OF_STATUS:
        where = clip(f"{request.method} {request.url.path}", 200)
        what = "no such path" if error.status_code == 404 else "this path does not take this method"
        error = HTTPException(error.status_code, f"{what}: {where}", error.headers)
    return ErrorReply.of(error).response()
