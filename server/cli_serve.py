"""`forkpoint serve`: finds the model, makes the parts of the server and joins them."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from forkpoint.configs.serving import SamplingDefaults, ServerConfig
from forkpoint.configs.settings import ServeSettings
from forkpoint.configs.settings_mapping import check_settings, engine_config, server_config
from forkpoint.configs.start_clock import StartClock
from forkpoint.server.cli_layers import CACHE_VARIABLE
from forkpoint.server.cli_progress import StartupProgress, startup_progress
from forkpoint.server.listener import bind_listener
from forkpoint.server.sd_notify import ServiceNotifier
from forkpoint.server.tracing_start import open_tracing, require_tracing

if TYPE_CHECKING:
    from forkpoint.scheduler.process_client import ProcessEngine
    from forkpoint.server.text import Tokenizer

_log = structlog.stdlib.get_logger(__name__)


def serve_model(model: str, settings: ServeSettings) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit status.

    Raises ConfigError or ModelLoadError for what the user can put right, before anything slow where possible.
    """
    check_settings(settings)
    config = server_config(settings, model)
    require_tracing(config.otlp_traces_endpoint, _otlp_protocol())
    # Fetching and loading take long; a port that is taken should be said before.
    bind_listener(config.host, config.port).close()
    notifier = ServiceNotifier.of_environment(os.environ, os.getpid())
    with contextlib.closing(startup_progress()) as progress:
        return _serve(model, settings, config, progress, notifier)


def ready_text(url: str, config: ServerConfig, *, can_chat: bool = False) -> str:
    """What is printed once requests are taken: where the server is, and a request to try.

    can_chat: whether the model has a chat template.
    """
    key = ' -H "Authorization: Bearer $API_KEY"' if config.api_keys else ""
    body = {"model": config.served_model_names[0], "prompt": "The capital of France is", "max_tokens": 16}
    return (
        f"\nForkpoint serves {config.served_model_names[0]} on {url}\n\n"
        f"  curl {url}/v1/completions -H 'Content-Type: application/json'{key} \\\n"
        f"    -d '{json.dumps(body)}'\n" + (f"  forkpoint chat --url {url}\n" if can_chat else "")
    )


def _serve(
    model: str,
    settings: ServeSettings,
    config: ServerConfig,
    progress: StartupProgress,
    notifier: ServiceNotifier,
) -> int:
    from forkpoint.model.resolve import default_cache_dir, resolve_model
    from forkpoint.scheduler.process_client import ProcessEngine

    start = StartClock("command line")
    start.begin("model")

    def show(what: str, done: int, total: int) -> None:
        progress.show(what, done, total)
        notifier.progress(what, done, total)

    own_cache = os.environ.get(CACHE_VARIABLE)
    cache_dir = Path(own_cache).expanduser() if own_cache else default_cache_dir(dict(os.environ))
    model_dir = resolve_model(
        model,
        cache_dir=cache_dir,
        progress=show,
        notice=progress.note,
        has_weights=settings.load_format != "dummy",
        converts_gguf=settings.load_format != "safetensors",
    )
    engine = ProcessEngine(engine_config(settings, model_dir), max_queued=config.max_queued_requests)
    with contextlib.closing(engine):
        # First of all: importing torch and loading the weights takes longer than all that is left here.
        engine.on_progress(lambda step: show(step.what, step.done, step.total))
        engine.spawn()
        start.begin("imports")
        if settings.generation_config == "auto":
            config = replace(config, sampling_defaults=_sampling_defaults(model_dir))
        return _serve_beside(engine, model_dir, config, progress, start, notifier)


def _serve_beside(
    engine: ProcessEngine,
    model_dir: Path,
    config: ServerConfig,
    progress: StartupProgress,
    start: StartClock,
    notifier: ServiceNotifier,
) -> int:
    """Make the parts of this process while the engine's loads, and serve."""
    from forkpoint.server.chat_template import ChatTemplate
    from forkpoint.server.run import run_server
    from forkpoint.server.startup_report import report_text, start_fields, start_text
    from forkpoint.server.structured_check import WorkerGrammarChecks
    from forkpoint.server.text import Tokenizer

    start.begin("tokenizer")
    tokenizer = Tokenizer.load(model_dir)
    start.begin("chat template")
    template = ChatTemplate.load(model_dir, config.chat_template)
    start.begin("waiting for the engine")

    def announce(url: str) -> None:
        start.begin("ready")
        progress.close()
        _log.info("start_took", **start_fields(start.stages, engine.stages))
        if engine.info is not None:
            print(report_text(engine.info, config.sampling_defaults), flush=True)
        print(start_text(start.stages, engine.stages), flush=True)
        print(ready_text(url, config, can_chat=template is not None), flush=True)

    grammars = WorkerGrammarChecks(_grammar_command(model_dir, tokenizer))
    return run_server(
        config,
        engine,
        tokenizer,
        template,
        grammars=grammars,
        on_ready=announce,
        notifier=notifier,
        tracing=open_tracing(config.otlp_traces_endpoint),
    )


def _sampling_defaults(model_dir: Path) -> SamplingDefaults:
    from forkpoint.server.generation_config import read_sampling_defaults

    return read_sampling_defaults(model_dir)


def _otlp_protocol() -> str | None:
    """What OpenTelemetry's own variables ask for; the one for traces wins."""
    return os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL"
    )


def _grammar_command(model_dir: Path, tokenizer: Tokenizer) -> list[str]:
    module = "forkpoint.scheduler.grammar_worker"
    eos = map(str, sorted(tokenizer.eos_token_ids))
    return [sys.executable, "-m", module, str(model_dir.resolve()), str(tokenizer.vocab_size), *eos]
