"""From what a person asked for to what each process is told; refuses what is wrong or not built."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TypeVar

from forkpoint.configs.errors import ConfigError
from forkpoint.configs.serving import EngineConfig, ServerConfig
from forkpoint.configs.settings import ServeSettings

MAX_PORT = 65535
MAX_THREADS = 1024

T = TypeVar("T", int, float)


def check_settings(settings: ServeSettings) -> None:
    """Raise ConfigError for the first setting that is out of its range or whose feature is not built."""
    _refuse_unbuilt(settings)
    _require("--port", settings.port, 0, MAX_PORT)
    for flag, count in (
        ("--context-length", settings.context_length),
        ("--page-size", settings.page_size),
        ("--max-running-requests", settings.max_running_requests),
        ("--chunked-prefill-size", settings.chunked_prefill_size),
        ("--kv-cache-memory-bytes", settings.kv_cache_memory_bytes),
        ("--max-total-tokens", settings.max_total_tokens),
        ("--swa-total-tokens", settings.swa_total_tokens),
        ("--rebuild-depth", settings.rebuild_depth),
    ):
        _require(flag, count, 1, math.inf)
    _require("--threads", settings.threads, 1, MAX_THREADS)
    _require("--max-queued-requests", settings.max_queued_requests, 0, math.inf)
    _require("--shutdown-timeout", settings.shutdown_timeout, 0, math.inf)
    for flag, share in (
        ("--mem-fraction-static", settings.mem_fraction_static),
        ("--swa-full-tokens-ratio", settings.swa_full_tokens_ratio),
    ):
        _require_share(flag, share)
    if settings.swa_total_tokens != "auto" and settings.swa_full_tokens_ratio != "auto":
        raise ConfigError(
            "--swa-total-tokens and --swa-full-tokens-ratio both set the sliding-window pool",
            hint="give one of them",
        )
    for origin in settings.allowed_origins:
        _require_origin(origin)
    if settings.otlp_traces_endpoint is not None:
        _require_url("--otlp-traces-endpoint", settings.otlp_traces_endpoint)
    if settings.chat_template is not None and not settings.chat_template.is_file():
        raise ConfigError(
            f"--chat-template {settings.chat_template} is not a file",
            hint="give the path of a Jinja template",
        )


def engine_config(settings: ServeSettings, model_dir: Path) -> EngineConfig:
    """What the engine process is told; "auto" becomes None where the engine decides."""
    return EngineConfig(
        model_dir=model_dir,
        device=settings.device,
        dtype=settings.dtype,
        kv_cache_dtype=settings.kv_cache_dtype,
        attention_backend=settings.attention_backend,
        load_format=settings.load_format,
        quantization=settings.quantization,
        num_threads=_chosen(settings.threads),
        context_length=_chosen(settings.context_length),
        page_size=settings.page_size,
        max_running_requests=_chosen(settings.max_running_requests),
        chunked_prefill_size=_chosen(settings.chunked_prefill_size),
        kv_cache_memory_bytes=_chosen(settings.kv_cache_memory_bytes),
        mem_fraction_static=_chosen(settings.mem_fraction_static),
        full_tokens=_chosen(settings.max_total_tokens),
        swa_tokens=_chosen(settings.swa_total_tokens),
        swa_full_tokens_ratio=_chosen(settings.swa_full_tokens_ratio),
        enable_radix_cache=not settings.disable_radix_cache,
        retention=settings.retention,
        radix_eviction_policy=settings.radix_eviction_policy,
        enable_rebuild=not settings.disable_rebuild,
        rebuild_depth=_chosen(settings.rebuild_depth),
        log_level=settings.log_level,
        log_format=settings.log_format,
    )


def server_config(settings: ServeSettings, model: str) -> ServerConfig:
    """What the API process is told. Reads --api-key-file; raises ConfigError if it cannot."""
    return ServerConfig(
        served_model_names=settings.served_model_name or (default_model_name(model),),
        host=settings.host,
        port=settings.port,
        api_keys=_api_keys(settings),
        metrics_need_key=not settings.metrics_without_key,
        has_page=not settings.no_ui,
        allowed_origins=settings.allowed_origins,
        chat_template=settings.chat_template,
        tool_call_parser=settings.tool_call_parser,
        reasoning_parser=settings.reasoning_parser,
        max_queued_requests=settings.max_queued_requests,
        otlp_traces_endpoint=settings.otlp_traces_endpoint,
        shutdown_timeout_s=settings.shutdown_timeout,
        log_level=settings.log_level,
        log_format=settings.log_format,
    )


def default_model_name(model: str) -> str:
    """The last part of MODEL: `org/name`, `org/name@revision` and `/path/to/name/` give `name`."""
    is_path = Path(model).expanduser().exists()
    return Path(model if is_path else model.partition("@")[0]).name or model


def _refuse_unbuilt(settings: ServeSettings) -> None:
    unbuilt = (
        (
            settings.quantization not in ("none", "int8"),
            f"--quantization {settings.quantization}",
            "--quantization int8, or --dtype bfloat16",
        ),
        (
            settings.attention_backend == "flashinfer",
            "--attention-backend flashinfer",
            "--attention-backend torch, which runs on any device",
        ),
        (settings.tp_size > 1, f"--tp-size {settings.tp_size}", "--tp-size 1"),
        (
            settings.grammar_backend != "llguidance",
            f"--grammar-backend {settings.grammar_backend}",
            "--grammar-backend llguidance",
        ),
    )
    for is_asked, what, instead in unbuilt:
        if is_asked:
            hint = f"use {instead}" if instead else f"leave {what.split()[0]} out"
            raise ConfigError(f"{what} is not built yet", hint=hint)
    _require("--tp-size", settings.tp_size, 1, 1)


def _api_keys(settings: ServeSettings) -> tuple[str, ...]:
    keys = settings.api_key
    if settings.api_key_file is not None:
        try:
            lines = settings.api_key_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--api-key-file {settings.api_key_file} cannot be read: {error}",
                hint="give a text file with one key a line",
            ) from error
        from_file = tuple(
            line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")
        )
        if not from_file:
            raise ConfigError(
                f"--api-key-file {settings.api_key_file} holds no key",
                hint="give a text file with one key a line",
            )
        keys = (*keys, *from_file)
    if any(not key.strip() for key in keys):
        # An empty key would look like protection and let everybody in, or nobody.
        raise ConfigError(
            "an API key is empty", hint="give --api-key a value, or leave it out to serve without keys"
        )
    return keys


def _require_origin(origin: str) -> None:
    # A browser sends scheme, host and port, nothing behind; anything else would never match.
    if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/?#@]+", origin):
        raise ConfigError(
            f"--allowed-origins {origin} is no origin", hint="write https://example.org:8080, or * for all"
        )


def _require_url(flag: str, url: str) -> None:
    if not re.fullmatch(r"https?://[^\s/?#@]+(/\S*)?", url):
        raise ConfigError(f"{flag} {url} is no URL", hint="write http://localhost:4318/v1/traces")


def _chosen(value: T | str) -> T | None:
    return None if isinstance(value, str) else value


def _require(flag: str, value: float | str, low: float, high: float) -> None:
    # `not (low <= value)` also refuses NaN.
    if not isinstance(value, str) and not (low <= value <= high and math.isfinite(value)):
        limit = f"at least {low:g}" if high == math.inf else f"{low:g} to {high:g}"
        raise ConfigError(f"{flag} is {value}; it must be {limit}", hint=f"change {flag}")


def _require_share(flag: str, value: float | str) -> None:
    if not isinstance(value, str) and not 0 < value <= 1:
        raise ConfigError(f"{flag} is {value}; it must be above 0 and at most 1", hint=f"change {flag}")
