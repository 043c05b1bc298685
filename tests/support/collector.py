"""A stand-in for an OpenTelemetry collector on the loopback: takes traces by OTLP over HTTP."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass
class Collector:
    """paths, headers: of every POST, header names in lower case. exports: what it brought."""

    url: str = ""
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    exports: list[ExportTraceServiceRequest] = field(default_factory=list)
    news: threading.Condition = field(default_factory=threading.Condition)

    def span_names(self) -> list[str]:
        return [
            span.name
            for export in self.exports
            for resource in export.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def resource(self) -> dict[str, str]:
        """Who sent the first spans."""
        attributes = self.exports[0].resource_spans[0].resource.attributes
        return {attribute.key: attribute.value.string_value for attribute in attributes}

    def wait_for_span(self, name: str) -> None:
        with self.news:
            assert self.news.wait_for(lambda: name in self.span_names(), 30), self.span_names()


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Take(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            with collector.news:
                collector.paths.append(self.path)
                collector.headers.append({name.lower(): value for name, value in self.headers.items()})
                collector.exports.append(ExportTraceServiceRequest.FromString(body))
                collector.news.notify_all()
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Take) as server:
        server.daemon_threads = True
        collector.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join(10)
