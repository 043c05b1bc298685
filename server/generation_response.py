"""The life of one generation request: read, checked, submitted, answered as a whole or in a stream."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import aclosing
from typing import Protocol

import orjson
import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forkpoint.server.answer_format import AnswerFormat, ChoiceCollector, WireObject
from forkpoint.server.choice import ChoiceDelta, ChoiceEvent
from forkpoint.server.errors import ClientGone, ErrorReply
from forkpoint.server.generation import Generation, GenerationRequest
from forkpoint.server.generation_fields import GenerationOptions
from forkpoint.server.message_pieces import ContentPiece
from forkpoint.server.request_id import request_id_of
from forkpoint.server.services import Services
from forkpoint.server.spliced_frames import SplicedFrames
from forkpoint.server.sse import WRITE_NOW, EventStream, encode_event
from forkpoint.server.tracing import RequestTrace
from forkpoint.server.watched import raise_on_disconnect, run_watched

_log = structlog.stdlib.get_logger(__name__)


class GenerationApi(Protocol):
    """What differs between chat and completions."""

    async def read(self, body: Mapping[str, object]) -> GenerationRequest: ...
    def format(self, request: GenerationRequest, created: int) -> AnswerFormat: ...


class GenerationResponse(Response):
    """Does the work of the request when it is called, since only then it has `receive` and `send`.

    Errors before the first byte are raised, and become HTTP errors; later ones become an error event.
    """

    def __init__(self, services: Services, api: GenerationApi) -> None:
        super().__init__()
        self._services = services
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services = self._services
        timer = services.metrics.request()
        generation: Generation | None = None
        try:
            with (
                services.tracing.request(scope, request_id_of(scope)) as trace,
                services.lifecycle.running_request(),
            ):
                request = await self._read(scope, receive)
                trace.checked(request)
                generation = services.generator.submit(request, timer)
                trace.submitted(generation)
                with services.live_requests.following(request_id_of(scope), scope["path"], generation):
                    await self._answer(generation, trace, scope, receive, send)
        except ClientGone:
            _log.debug("client disconnected")
        except Exception as error:
            if generation is None:
                services.metrics.refused(error)
            raise

    async def _read(self, scope: Scope, receive: Receive) -> GenerationRequest:
        services = self._services
        body = await services.bodies.read(scope, receive)
        request = await self._api.read(body)
        services.lifecycle.require_serving()  # once more: tokenising took its time
        return request

    async def _answer(
        self, generation: Generation, trace: RequestTrace, scope: Scope, receive: Receive, send: Send
    ) -> None:
        answer_format = self._api.format(generation.request, int(time.time()))
        trace.answering(answer_format.response_id)
        try:
            if generation.request.options.is_stream:
                stream = EventStream(send, scope.get("extensions", {}).get(WRITE_NOW, {}).get("call"))
                await self._answer_in_stream(generation, trace, answer_format, receive, stream)
            else:
                await run_watched(
                    _collect(generation, answer_format, send),
                    raise_on_disconnect(receive),
                    self._services.lifecycle.raise_on_expiry(),
                )
        except ClientGone:
            raise
        except Exception:
            generation.close(has_failed=True)
            raise
        finally:
            generation.close()

    async def _answer_in_stream(
        self,
        generation: Generation,
        trace: RequestTrace,
        answer_format: AnswerFormat,
        receive: Receive,
        stream: EventStream,
    ) -> None:
        try:
            await run_watched(
                _stream(generation, answer_format, stream),
                raise_on_disconnect(receive),
                self._services.lifecycle.raise_on_expiry(),
                stream.keep_alive(self._services.timing.keep_alive_s),
            )
        except ClientGone:
            raise
        except Exception as error:
            if not stream.has_started:
                raise
            generation.close(has_failed=True)
            trace.failed(error)
            await _end_with_error(stream, error)


async def _collect(generation: Generation, answer_format: AnswerFormat, send: Send) -> None:
    collectors = [ChoiceCollector() for _ in generation.choices]
    async with aclosing(generation.events()) as events:
        async for news in events:
            for event in news:
                collectors[event.index].add(event)
    choices = [collector.finished() for collector in collectors]
    body = orjson.dumps(answer_format.answer(choices, generation.usage))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _stream(generation: Generation, answer_format: AnswerFormat, stream: EventStream) -> None:
    options = generation.request.options
    encoder = _EventEncoder(generation, options, answer_format)
    async with aclosing(generation.events()) as events:
        async for news in events:
            frames = b"".join(map(encoder.frames, news))
            if frames:
                await stream.write(frames)
    if options.has_usage:
        await stream.write(encode_event(answer_format.usage_chunk(generation.usage)))
    await stream.finish()


class _EventEncoder:
    """Frames of one stream's events. Mutable: keeps what frames of plain text have in common."""

    def __init__(
        self, generation: Generation, options: GenerationOptions, answer_format: AnswerFormat
    ) -> None:
        self._generation = generation
        self._options = options
        self._format = answer_format
        self._plain: dict[int, SplicedFrames | None] = {}

    def frames(self, event: ChoiceEvent) -> bytes:
        if isinstance(event, ChoiceDelta) and len(event.pieces) == 1 and not event.entries:
            (piece,) = event.pieces
            spliced = self._spliced_frames(event.index)
            if isinstance(piece, ContentPiece) and spliced is not None:
                return spliced.frame(piece.text)
        return b"".join(map(self._frame, self._format.chunks(event)))

    def _frame(self, chunk: WireObject) -> bytes:
        if self._options.has_usage and "type" not in chunk:
            # OpenAI: every chunk has the key once usage is asked for, and null in all but the last. Typed
            # events (/v1/responses) have it in the last one alone.
            is_told = self._options.has_continuous_usage
            chunk["usage"] = self._generation.usage.as_json() if is_told else None
        return encode_event(chunk)

    def _spliced_frames(self, index: int) -> SplicedFrames | None:
        """None if frames of plain text differ in more than their text."""
        if index in self._plain:
            return self._plain[index]

        def encode(text: str) -> bytes:
            chunk = self._format.plain_chunk(index, text)
            assert chunk is not None
            return self._frame(chunk)

        differs = self._options.has_continuous_usage or self._format.plain_chunk(index, "") is None
        self._plain[index] = None if differs else SplicedFrames(encode)
        return self._plain[index]


async def _end_with_error(stream: EventStream, error: Exception) -> None:
    reply = ErrorReply.of(error)
    if reply.code == "internal_error":
        _log.error("stream failed", exc_info=error)
    await stream.write(encode_event(reply.envelope))
    await stream.finish()
