"""Collects finished spans, and finds those of one request."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind

from forkpoint.server.tracing_otel import OtelTracing


class CollectedSpans(SpanExporter):
    """Keeps all spans. A request's own span ends last, so when it is here, those below it are too."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._spans: list[ReadableSpan] = []
        self._num_given = 0
        self.tracing = OtelTracing(SimpleSpanProcessor(self))

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with self._news:
            self._spans += spans
            self._news.notify_all()
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass

    def request(self) -> ReadableSpan:
        """The span of the next request, in the order of their ends; waits for it."""
        with self._news:
            assert self._news.wait_for(lambda: len(self._requests()) > self._num_given, 10), "no span came"
            self._num_given += 1
            return self._requests()[self._num_given - 1]

    def below(self, parent: ReadableSpan) -> list[ReadableSpan]:
        """The spans whose parent this is, in the order in which they were made."""
        return [span for span in self._spans if span.parent is not None and span.parent == parent.context]

    @property
    def all(self) -> list[ReadableSpan]:
        return list(self._spans)

    def _requests(self) -> list[ReadableSpan]:
        return [span for span in self._spans if span.kind is SpanKind.SERVER]
