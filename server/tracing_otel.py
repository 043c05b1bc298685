"""Traces of generation requests by OpenTelemetry: one span per request, below it the phases of its choices.

Names follow the GenAI conventions (opentelemetry.io/docs/specs/semconv/gen-ai), vLLM's where those have none,
and begin with `forkpoint.` for what only this server has. Counts, times and settings only, never text: errors
are told by their type and code, since their messages may quote a request.

Needs the extra `otel`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from importlib.metadata import version
from types import TracebackType

import structlog
from opentelemetry import propagate
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.util.types import AttributeValue
from starlette.datastructures import Headers
from starlette.types import Scope

from forkpoint.server.choice import Choice
from forkpoint.server.errors import ClientGone, ErrorReply
from forkpoint.server.generation import Generation, GenerationRequest
from forkpoint.server.generation_fields import GenerationOptions
from forkpoint.server.trace_phases import Phase, phases_of
from forkpoint.server.tracing import RequestTrace

# A request may ask for 128 choices of each of many prompts; their spans would push others out of the queue.
MAX_TRACED_CHOICES = 16
# A collector that does not answer must not hold the exit up for the exporter's own 30 s.
FLUSH_TIMEOUT_S = 3.0

_log = structlog.stdlib.get_logger(__name__)


class OtelTracing:
    """Tracing by a tracer of its own, not the process-wide one. Sampling and limits: OTEL_* variables."""

    def __init__(self, processor: SpanProcessor, *, flush_timeout_s: float = FLUSH_TIMEOUT_S) -> None:
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("forkpoint", version("forkpoint"))
        self._flush_timeout_s = flush_timeout_s

    @classmethod
    def to_collector(cls, endpoint: str) -> OtelTracing:
        """Sends batches from a thread. Beyond a bounded number spans are dropped, so nothing ever waits."""
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))

    def request(self, scope: Scope, request_id: str) -> RequestTrace:
        return _SpanOfRequest(self._tracer, scope, request_id)

    async def close(self) -> None:
        # A daemon: what is stuck in it after the bound must not hold up the end of the process.
        flush = threading.Thread(target=self._provider.shutdown, name="flush-traces", daemon=True)
        flush.start()
        await asyncio.to_thread(flush.join, self._flush_timeout_s)
        if flush.is_alive():
            _log.warning("traces lost: the collector did not take them", timeout_s=self._flush_timeout_s)


class _SpanOfRequest:
    """Mutable: collects what is known of one request. Its phases become spans at the end, with true times."""

    def __init__(self, tracer: Tracer, scope: Scope, request_id: str) -> None:
        self._tracer = tracer
        self._start_s = time.monotonic()
        # One offset for all times of the request, so that a clock that is set meanwhile mixes nothing up.
        self._epoch_offset_ns = time.time_ns() - _ns(self._start_s)
        self._generation: Generation | None = None
        self._is_stream = False
        self._has_failed = False
        path: str = scope["path"]
        self._operation = "text_completion" if path == "/v1/completions" else "chat"
        self._span = tracer.start_span(
            self._operation,
            context=propagate.extract(Headers(scope=scope)),
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": self._operation,
                "gen_ai.provider.name": "forkpoint",
                "gen_ai.request.id": request_id,
                "http.request.method": scope["method"],
                "http.route": path,
            },
            start_time=self._epoch_ns(self._start_s),
        )

    def checked(self, request: GenerationRequest) -> None:
        options = request.options
        self._is_stream = options.is_stream
        self._span.update_name(f"{self._operation} {options.model}")
        if self._span.is_recording():
            self._span.set_attributes(_asked(options))

    def submitted(self, generation: Generation) -> None:
        self._generation = generation

    def answering(self, response_id: str) -> None:
        self._span.set_attribute("gen_ai.response.id", response_id)

    def failed(self, error: Exception) -> None:
        self._has_failed = True
        _record_error(self._span, error)
        self._span.set_attribute("http.response.status_code", 200)

    def __enter__(self) -> _SpanOfRequest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_s = time.monotonic()
        if self._span.is_recording():
            if self._generation is not None:
                self._record_generation(self._generation)
            self._record_outcome(error)
            self._span.set_attribute("gen_ai.latency.e2e", end_s - self._start_s)
        self._span.end(self._epoch_ns(end_s))

    def _record_outcome(self, error: BaseException | None) -> None:
        if isinstance(error, ClientGone):
            self._span.add_event("client disconnected")  # nobody's fault here, so no error status
        elif isinstance(error, Exception):
            _record_error(self._span, error)
            self._span.set_attribute("http.response.status_code", ErrorReply.of(error).status)
        elif error is not None:  # the server gives its tasks up
            self._span.set_status(StatusCode.ERROR, "cancelled")
            self._span.set_attribute("error.type", "cancelled")
        elif not self._has_failed:
            self._span.set_attribute("http.response.status_code", 200)

    def _record_generation(self, generation: Generation) -> None:
        usage, choices = generation.usage, generation.choices
        self._span.set_attributes(
            {
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                "gen_ai.usage.reasoning.output_tokens": usage.reasoning_tokens,
                "forkpoint.usage.rebuilt_tokens": usage.rebuilt_tokens,
                "gen_ai.response.finish_reasons": [choice.timer.finish_reason or "" for choice in choices],
            }
        )
        first_tokens_s = [c.timer.first_token_s for c in choices if c.timer.first_token_s is not None]
        if first_tokens_s:
            first_token_s = min(first_tokens_s) - self._start_s
            self._span.set_attribute("gen_ai.latency.time_to_first_token", first_token_s)
            if self._is_stream:
                self._span.set_attribute("gen_ai.response.time_to_first_chunk", first_token_s)
        queue_times_s = [c.timer.queue_time_s for c in choices if c.timer.queue_time_s is not None]
        if queue_times_s:
            self._span.set_attribute("gen_ai.latency.time_in_queue", max(queue_times_s))
        for choice in choices[:MAX_TRACED_CHOICES]:
            for phase in phases_of(choice.timer):
                self._record_phase(generation, choice, phase)

    def _record_phase(self, generation: Generation, choice: Choice, phase: Phase) -> None:
        span = self._tracer.start_span(
            phase.name,
            context=set_span_in_context(self._span),
            attributes={"forkpoint.choice.index": choice.index},
            start_time=self._epoch_ns(phase.start_s),
        )
        if phase.name == "prefill" and choice.started is not None:
            cached, rebuilt = choice.started.cached_tokens, choice.started.rebuilt_tokens
            num_tokens = len(generation.request.prompt_of(choice.index).token_ids)
            span.set_attributes(
                {
                    "forkpoint.prefill.cached_tokens": cached,
                    "forkpoint.prefill.rebuilt_tokens": rebuilt,
                    "forkpoint.prefill.computed_tokens": num_tokens - cached - rebuilt,
                }
            )
            if rebuilt:
                # Its rows are the first of the prefill.
                tokens = {"forkpoint.prefill.rebuilt_tokens": rebuilt}
                span.add_event("rebuild", tokens, self._epoch_ns(phase.start_s))
        if phase.name == "decode":
            span.set_attribute("gen_ai.usage.output_tokens", choice.num_tokens)
        span.end(self._epoch_ns(phase.end_s))

    def _epoch_ns(self, monotonic_s: float) -> int:
        return _ns(monotonic_s) + self._epoch_offset_ns


def _asked(options: GenerationOptions) -> dict[str, AttributeValue]:
    """What the request asks for; what is off, or not given, is left out."""
    attributes: dict[str, AttributeValue] = {
        "gen_ai.request.model": options.model,
        "gen_ai.response.model": options.model,
        "gen_ai.request.temperature": options.temperature,
        "gen_ai.request.top_p": options.top_p,
        "gen_ai.request.stream": options.is_stream,
    }
    if options.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = options.max_tokens
    if options.num_choices > 1:
        attributes["gen_ai.request.choice.count"] = options.num_choices
    if options.top_k > 0:
        attributes["gen_ai.request.top_k"] = options.top_k
    if options.frequency_penalty:
        attributes["gen_ai.request.frequency_penalty"] = options.frequency_penalty
    if options.presence_penalty:
        attributes["gen_ai.request.presence_penalty"] = options.presence_penalty
    return attributes


def _record_error(span: Span, error: Exception) -> None:
    reply = ErrorReply.of(error)
    what = reply.code or reply.type
    span.set_status(StatusCode.ERROR, f"{what}: {reply.param}" if reply.param else what)
    span.set_attribute("error.type", what)
    kind = type(error)
    span.add_event("exception", {"exception.type": f"{kind.__module__}.{kind.__qualname__}"})


def _resource() -> Resource:
    """Who sends the traces: as OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say, by default `forkpoint`."""
    resource = Resource({"service.name": "forkpoint", "service.version": version("forkpoint")})
    asked = Resource.create()
    has_name = not str(asked.attributes["service.name"]).startswith("unknown_service")
    return resource.merge(asked) if has_name else asked.merge(resource)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
