"""Where traces go: to a collector in batches, never at the price of an answer, and nowhere by default."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from support.collector import collecting
from support.http_server import MODEL, serving

from forkpoint.configs.errors import ConfigError
from forkpoint.server.cli import run
from forkpoint.server.tracing import Tracing
from forkpoint.server.tracing_otel import OtelTracing
from forkpoint.server.tracing_start import open_tracing, require_tracing

TESTS = Path(__file__).resolve().parent.parent
# Traces are sent this long after the first of a batch.
BATCH_DELAY = "OTEL_BSP_SCHEDULE_DELAY"


@pytest.fixture(autouse=True)
def _no_settings_of_the_person_who_runs_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


def close(tracing: Tracing) -> float:
    """Close it, and return how long that took."""
    begin_s = time.monotonic()
    asyncio.run(tracing.close())
    return time.monotonic() - begin_s


@pytest.mark.parametrize("path", ["", "/", "/v1/traces", "/in/front/v1/traces"])
def test_traces_arrive_at_the_collector(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=secret")
    monkeypatch.setenv(BATCH_DELAY, "10")
    with collecting() as collector:
        tracing = open_tracing(collector.url + path)
        with serving(tracing=tracing) as world:
            world.complete(max_tokens=2)
            collector.wait_for_span(f"text_completion {MODEL}")
        close(tracing)
        assert sorted(collector.span_names()) == ["decode", "prefill", "queue", f"text_completion {MODEL}"]
        assert set(collector.paths) == {path if path not in ("", "/") else "/v1/traces"}
        assert {headers["authorization"] for headers in collector.headers} == {"secret"}
        assert collector.resource()["service.name"] == "forkpoint"


def test_what_was_not_sent_yet_is_sent_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BATCH_DELAY, "3600000")
    with collecting() as collector:
        tracing = open_tracing(collector.url)
        with serving(tracing=tracing) as world:
            world.complete(max_tokens=2)
        assert collector.exports == []
        close(tracing)
        assert f"text_completion {MODEL}" in collector.span_names()


def test_the_service_is_named_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=here")
    with collecting() as collector:
        tracing = open_tracing(collector.url)
        with serving(tracing=tracing) as world:
            world.complete(max_tokens=1)
        close(tracing)
        resource = collector.resource()
    assert resource["service.name"] == "mine"
    assert resource["deployment.environment.name"] == "here"
    assert resource["service.version"]


def test_the_sampler_of_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    with collecting() as collector:
        tracing = open_tracing(collector.url)
        with serving(tracing=tracing) as world:
            world.complete(max_tokens=1)
        close(tracing)
        assert collector.exports == []


@contextlib.contextmanager
def refusing() -> Iterator[str]:
    """An address where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}/v1/traces"


@contextlib.contextmanager
def silent() -> Iterator[str]:
    """An address that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1/traces"


@pytest.mark.parametrize("dead", [refusing, silent])
def test_a_dead_collector_neither_stops_answers_nor_holds_up_the_end(
    dead: type[contextlib.AbstractContextManager[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("SCHEDULE_DELAY", "1"), ("MAX_QUEUE_SIZE", "8"), ("MAX_EXPORT_BATCH_SIZE", "2")):
        monkeypatch.setenv(f"OTEL_BSP_{name}", value)
    with dead() as endpoint:
        # Far longer than the test may take: whoever waited for the exporter would be seen.
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=600)
        tracing = OtelTracing(BatchSpanProcessor(exporter), flush_timeout_s=0.1)
        with serving(tracing=tracing) as world:
            for _ in range(20):  # more spans than the queue takes
                assert world.complete(max_tokens=2)["usage"]["completion_tokens"] == 2
        assert close(tracing) < 20
        exporter.shutdown()  # type: ignore[no-untyped-call]


def test_without_the_flag_nothing_is_imported() -> None:
    program = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from support.http_server import serving
import forkpoint.server.cli_serve, forkpoint.server.run
from forkpoint.server.tracing_start import open_tracing, require_tracing
require_tracing(None, "grpc")
with serving(tracing=open_tracing(None)) as world:
    world.complete(max_tokens=2)
# fastapi imports the API by itself where it is installed.
print([name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1:] == ["[]"], (done.stdout, done.stderr)


@pytest.mark.parametrize("missing", ["opentelemetry", "opentelemetry.exporter"])
def test_without_the_extra_the_flag_is_refused_with_what_to_install(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name == missing or name.startswith(f"{missing}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    assert run(["serve", "/does/not/exist", "--otlp-traces-endpoint", "http://localhost:4318"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "forkpoint: error: --otlp-traces-endpoint needs OpenTelemetry, which is not installed",
        "hint: pip install 'forkpoint[otel]'",
    ]


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"])
def test_a_protocol_that_is_not_built_is_refused_by_name(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "grpc")
    assert run(["serve", "/does/not/exist", "--otlp-traces-endpoint", "http://localhost:4317"]) == 2
    error = capsys.readouterr().err
    assert "cannot be sent by grpc" in error and "http/protobuf" in error


def test_the_protocol_that_is_built_is_taken() -> None:
    for protocol in (None, "", "http/protobuf"):
        require_tracing("http://localhost:4318", protocol)
    with pytest.raises(ConfigError):
        require_tracing("http://localhost:4318", "http/json")


@pytest.mark.parametrize("url", ["localhost:4318", "grpc://localhost:4317", "http://", "ftp://host", ""])
def test_what_is_no_url_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show-config", "--otlp-traces-endpoint", url]) == 2
    assert f"--otlp-traces-endpoint {url} is no URL" in capsys.readouterr().err
