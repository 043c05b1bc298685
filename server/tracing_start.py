"""Where traces are sent to: what the command line checks first, and makes of the setting later."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from forkpoint.configs.errors import ConfigError

if TYPE_CHECKING:
    from forkpoint.server.tracing import Tracing

_FLAG = "--otlp-traces-endpoint"
_PROTOCOL = "http/protobuf"
_TRACES_PATH = "/v1/traces"


def require_tracing(endpoint: str | None, protocol: str | None) -> None:
    """Raise ConfigError unless traces can be sent to `endpoint`. Quick: imports nothing of OpenTelemetry.

    endpoint: None: traces are off, and there is nothing to require. protocol: as OpenTelemetry's environment
    variables name it.
    """
    if endpoint is None:
        return
    if not _has_exporter():
        raise ConfigError(
            f"{_FLAG} needs OpenTelemetry, which is not installed", hint="pip install 'forkpoint[otel]'"
        )
    if protocol and protocol != _PROTOCOL:
        raise ConfigError(
            f"traces cannot be sent by {protocol}, which OTEL_EXPORTER_OTLP_PROTOCOL asks for",
            hint=f"use {_PROTOCOL}, which collectors take on port 4318",
        )


def open_tracing(endpoint: str | None) -> Tracing:
    """Traces to this collector (OTLP over HTTP); None: none. Its thread runs until close().

    An address without a path gets /v1/traces, where collectors listen.
    """
    if endpoint is None:
        from forkpoint.server.tracing import NoTracing

        return NoTracing()
    from forkpoint.server.tracing_otel import OtelTracing  # an extra, and half a second of imports

    has_path = urlsplit(endpoint).path not in ("", "/")
    return OtelTracing.to_collector(endpoint if has_path else endpoint.rstrip("/") + _TRACES_PATH)


def _has_exporter() -> bool:
    try:
        return all(map(find_spec, ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")))
    except ModuleNotFoundError:  # not even the package that it would lie in
        return False
