"""Talks to an OpenAI-compatible server, ours or another: which models it serves, and answers piece by piece.

Knows nothing of terminals. Every fault of the network or the server becomes a RemoteError of one line.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx2

from forkpoint.configs.errors import ConfigError, RemoteError

Message = dict[str, str]

# An answer may take as long as it needs (a long prompt on a CPU, a queue); a connection is there soon.
_CONNECT_TIMEOUT_S = 10.0
_DEFAULT_RETRY_S = 2.0
_MAX_RETRY_S = 30.0
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class ServerNotReady(RemoteError):
    """The server is there and says 503: it is loading, or its engine is being started again."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of an answer. reasoning: what a model thinks before it answers, where a server tells."""

    text: str
    kind: Literal["answer", "reasoning"] = "answer"


@dataclass(slots=True)
class Account:
    """What one answer took; mutable, because it is filled while that arrives. None: the server does not say.

    rebuilt_tokens: prompt tokens whose window was lost and computed again (Forkpoint only).
    """

    first_token_s: float | None = None
    last_token_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    rebuilt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None

    @property
    def computed_tokens(self) -> int | None:
        if self.prompt_tokens is None or self.cached_tokens is None:
            return None
        return self.prompt_tokens - self.cached_tokens - (self.rebuilt_tokens or 0)

    @property
    def tokens_per_s(self) -> float | None:
        """Speed after the first token; None for an answer that came at once."""
        if self.completion_tokens is None or self.first_token_s is None or self.last_token_s is None:
            return None
        elapsed_s = self.last_token_s - self.first_token_s
        return (self.completion_tokens - 1) / elapsed_s if elapsed_s > 0 else None


@dataclass(slots=True)
class Answer:
    """One answer on its way. pieces: to be read once; account: complete when they are."""

    pieces: Generator[Piece, None, None]
    account: Account = field(default_factory=Account)


class ChatClient:
    """One server. Mutable: owns connections; close() ends them."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        """url: of the server or of its /v1; `http://` may be left out. Raises ConfigError if it is none."""
        self.url = server_url(url)
        # As bytes: a key may hold any character, and the library would refuse to encode some.
        self._headers = {} if api_key is None else {b"Authorization": b"Bearer " + api_key.encode()}
        self._http = self._connections()

    def close(self) -> None:
        self._http.close()

    def served_models(self) -> list[str]:
        """The names that the server lists, in its order. Raises RemoteError."""
        with self._errors_translated():
            response = self._http.get("/v1/models")
            self._raise_for_status(response)
            try:
                return [str(model["id"]) for model in response.json()["data"]]
            except (ValueError, KeyError, TypeError) as exc:
                raise RemoteError(
                    f"{self.url}/v1/models answers with no list of models",
                    hint="is it an OpenAI-compatible server? --url takes the address before /v1",
                ) from exc

    def read(self, path: str) -> Any:
        """The JSON that a GET of this path gives. Raises RemoteError, also where there is no such path."""
        with self._errors_translated():
            response = self._http.get(path)
            self._raise_for_status(response)
            try:
                return response.json()
            except ValueError as exc:
                raise RemoteError(f"{self.url}{path} answers with no JSON") from exc

    def answer(self, model: str, messages: Sequence[Message], options: Mapping[str, object]) -> Answer:
        """Ask; nothing is sent before the pieces are read. Whoever stops reading must close them: the
        connection then ends, and the server gives up the answer.

        Reading raises RemoteError; ServerNotReady only before the first piece.
        """
        body = {
            "model": model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **options,
        }
        account = Account()
        return Answer(self._pieces(body, account), account)

    def _pieces(self, body: Mapping[str, object], account: Account) -> Generator[Piece, None, None]:
        begin = time.monotonic()
        try:
            with (
                self._errors_translated(),
                self._http.stream("POST", "/v1/chat/completions", json=body) as response,
            ):
                if response.status_code != 200:
                    response.read()
                    self._raise_for_status(response)
                for piece in _read_events(response, account):
                    account.last_token_s = time.monotonic() - begin
                    if account.first_token_s is None:
                        account.first_token_s = account.last_token_s
                    yield piece
        except (KeyboardInterrupt, GeneratorExit):
            # It may have hit anywhere inside the library: no connection of this pool can be trusted.
            self._http.close()
            self._http = self._connections()
            raise

    def _connections(self) -> httpx2.Client:
        return httpx2.Client(
            base_url=self.url,
            headers=self._headers,
            timeout=httpx2.Timeout(_CONNECT_TIMEOUT_S, read=None),
            # A proxy cannot reach this machine's own loopback, though HTTP_PROXY may be set for all.
            trust_env=urlsplit(self.url).hostname not in _LOOPBACK,
        )

    @contextlib.contextmanager
    def _errors_translated(self) -> Iterator[None]:
        try:
            yield
        except httpx2.ConnectError as exc:
            raise RemoteError(
                f"no server answers at {self.url} ({one_line(exc)})",
                hint="start one with `forkpoint serve`, or give its address with --url",
            ) from exc
        except httpx2.TimeoutException as exc:
            raise RemoteError(f"{self.url} does not answer in time", hint="is --url right?") from exc
        except httpx2.SSEError as exc:
            raise RemoteError(f"{self.url} answers with no event stream: {one_line(exc)}") from exc
        except httpx2.RequestError as exc:
            raise RemoteError(f"the connection to {self.url} ended: {one_line(exc)}") from exc

    def _raise_for_status(self, response: httpx2.Response) -> None:
        """Raise what an answer other than 200 means to a person. Its body must have been read."""
        status = response.status_code
        if status == 200:
            return
        said = _error_message(response)
        if status == 503:
            raise ServerNotReady(said, _retry_after_s(response))
        hints = {
            401: "give the key with --api-key-file, --api-key or FORKPOINT_API_KEY",
            403: "give the key with --api-key-file, --api-key or FORKPOINT_API_KEY",
            429: "the server is busy: try again in a moment",
        }
        raise RemoteError(f"the server says {status}: {said}", hint=hints.get(status))


def _read_events(response: httpx2.Response, account: Account) -> Iterator[Piece]:
    has_ended = False
    for event in httpx2.EventSource(response):
        if event.data == "[DONE]":
            has_ended = True
            break
        try:
            chunk = json.loads(event.data)
        except ValueError as exc:
            raise RemoteError(f"the server sent an event that is no JSON: {event.data[:100]!r}") from exc
        if not isinstance(chunk, dict):
            continue
        if chunk.get("error"):
            raise RemoteError(f"the server broke off: {message_of(chunk)}")
        _note_usage(chunk.get("usage"), account)
        for choice in _choices_of(chunk):
            account.finish_reason = choice.get("finish_reason") or account.finish_reason
            delta = choice.get("delta") or {}
            if thought := delta.get("reasoning_content") or delta.get("reasoning"):
                yield Piece(str(thought), "reasoning")
            if text := delta.get("content"):
                yield Piece(str(text))
    if not has_ended and account.finish_reason is None:
        raise RemoteError("the server ended the connection in the middle of the answer")


def _choices_of(chunk: dict[str, Any]) -> list[dict[str, Any]]:
    choices = chunk.get("choices") or []
    is_list = isinstance(choices, list) and all(isinstance(choice, dict) for choice in choices)
    if not is_list or not all(isinstance(choice.get("delta") or {}, dict) for choice in choices):
        raise RemoteError(f"the server sent an event that is no chat chunk: {str(chunk)[:100]}")
    return list(choices)


def _note_usage(usage: Any, account: Account) -> None:
    if not isinstance(usage, dict):
        return
    account.prompt_tokens = usage.get("prompt_tokens")
    account.completion_tokens = usage.get("completion_tokens")
    details = usage.get("prompt_tokens_details") or {}
    account.cached_tokens = details.get("cached_tokens")
    account.rebuilt_tokens = details.get("rebuilt_tokens")


def server_url(url: str) -> str:
    """The address that a person gave, with its scheme and without /v1. Raises ConfigError if it is none."""
    text = url.strip()
    if "://" not in text:
        text = f"http://{text}"
    try:
        parts = urlsplit(text)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ConfigError(
            f"--url {url} is no address of a server", hint="give one like http://127.0.0.1:8000"
        )
    return text.rstrip("/").removesuffix("/v1")


def _error_message(response: httpx2.Response) -> str:
    try:
        body = response.json()
    except ValueError:
        body = None
    return message_of(body) or one_line(response.text)[:200] or response.reason_phrase


def message_of(body: Any) -> str:
    """The message in OpenAI's envelope, or in the shapes that other servers use."""
    error = body.get("error", body) if isinstance(body, dict) else None
    message = error.get("message", error.get("detail")) if isinstance(error, dict) else error
    return one_line(message)[:500] if message else ""


def one_line(value: object) -> str:
    """The text of `value` without line breaks, for a message."""
    return " ".join(str(value).split())


def _retry_after_s(response: httpx2.Response) -> float:
    try:
        return min(max(float(response.headers["retry-after"]), 0.1), _MAX_RETRY_S)
    except (KeyError, ValueError):
        return _DEFAULT_RETRY_S
