"""Sends every log line, ours, uvicorn's and the libraries', through structlog to stderr in one format."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog
from structlog.typing import Processor


def configure_logging(level: str, log_format: str, stream: TextIO | None = None) -> None:
    """Set up logging for this process. Called once, by whoever owns the process.

    level: debug, info, warning, error. log_format: `console`, `json`, or `auto` (console on a terminal).
    """
    target = sys.stderr if stream is None else stream
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    is_console = target.isatty() if log_format == "auto" else log_format == "console"
    renderers: list[Processor]
    if is_console:
        # Plain tracebacks: rich ones print local variables, and with them prompts.
        renderer = structlog.dev.ConsoleRenderer(
            colors=target.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
        renderers = [renderer]
    else:
        renderers = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    handler = logging.StreamHandler(target)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    # uvicorn brings its own handlers; its lines about every connection are for debugging.
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers = []
        logger.propagate = True
    logging.getLogger("uvicorn.error").setLevel(max(root.level, logging.WARNING) if root.level > 10 else 10)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
