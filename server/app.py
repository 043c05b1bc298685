"""Puts the HTTP server together: routes, middleware, error answers. Starts nothing."""

from __future__ import annotations

import time

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from forkpoint.configs.errors import ForkpointError
from forkpoint.configs.serving import ServerConfig
from forkpoint.scheduler.client import EngineClient
from forkpoint.server.aborts import AbortMiddleware, RunningRequests
from forkpoint.server.admin_api import admin_routes
from forkpoint.server.auth import OPEN_PATHS, ApiKeyMiddleware
from forkpoint.server.cache_view import cache_view_routes
from forkpoint.server.chat import ChatApi
from forkpoint.server.completions import CompletionsApi
from forkpoint.server.engine_metrics import EngineMetrics
from forkpoint.server.errors import answer_error
from forkpoint.server.generation import Generator
from forkpoint.server.generation_response import GenerationApi, GenerationResponse
from forkpoint.server.health import health_routes
from forkpoint.server.lifecycle import Lifecycle
from forkpoint.server.live_requests import LiveRequests
from forkpoint.server.live_view import live_view_routes
from forkpoint.server.models_api import models_routes
from forkpoint.server.openapi import openapi_routes
from forkpoint.server.page import PAGE_PATHS, page_routes
from forkpoint.server.request_body import BodyReader
from forkpoint.server.request_id import RequestIdMiddleware
from forkpoint.server.request_metrics import RequestMetrics
from forkpoint.server.responses import ResponsesApi
from forkpoint.server.services import Services, Timing
from forkpoint.server.step_log import StepLog
from forkpoint.server.structured_check import GrammarChecks, NoGrammars
from forkpoint.server.text_ports import PromptTemplate, TextTokenizer
from forkpoint.server.tokenization import tokenization_routes
from forkpoint.server.tools_dialect import Dialect
from forkpoint.server.tracing import NoTracing, Tracing
from forkpoint.server.turnstile import TurnstileMiddleware
from forkpoint.server.vllm_metrics import VllmAliases


def create_app(
    config: ServerConfig,
    engine: EngineClient,
    tokenizer: TextTokenizer,
    template: PromptTemplate | None,
    *,
    timing: Timing | None = None,
    grammars: GrammarChecks | None = None,
    tracing: Tracing | None = None,
) -> FastAPI:
    """The ASGI app over an engine that may still be loading. Its Lifecycle is `app.state.lifecycle`.

    grammars: None: requests that need one are refused. tracing: None: none; the caller closes it.
    """
    timing = timing or Timing()
    registry = CollectorRegistry()
    request_metrics = RequestMetrics(registry)
    engine_metrics = EngineMetrics(engine, registry)
    VllmAliases(config.served_model_names[0], engine, engine_metrics, request_metrics, registry)
    services = Services(
        config=config,
        engine=engine,
        tokenizer=tokenizer,
        template=template,
        dialect=_dialect(config, template),
        grammars=grammars or NoGrammars(),
        lifecycle=Lifecycle(engine),
        generator=Generator(engine, tokenizer),
        registry=registry,
        metrics=request_metrics,
        timing=timing,
        bodies=BodyReader(max_bytes=config.max_body_bytes, timeout_s=timing.body_timeout_s),
        created=int(time.time()),
        live_requests=LiveRequests(),
        tracing=tracing or NoTracing(),
    )
    running = RunningRequests()
    app = FastAPI(
        title="Forkpoint",
        middleware=_middleware(config, running),
        exception_handlers={HTTPException: answer_error, ForkpointError: answer_error},
        # The request bodies are not FastAPI models, so its schema would be empty: see openapi.py.
        openapi_url=None,
        redirect_slashes=False,
    )
    app.state.lifecycle = services.lifecycle
    app.include_router(health_routes(services.lifecycle))
    app.include_router(models_routes(services))
    app.include_router(admin_routes(services, running))
    app.include_router(cache_view_routes(services))
    app.include_router(live_view_routes(services, engine_metrics, StepLog(engine)))
    if config.has_page:
        app.include_router(page_routes())
    app.include_router(tokenization_routes(services))
    app.include_router(openapi_routes())
    _add_generation_route(app, "/v1/chat/completions", services, ChatApi(services))
    _add_generation_route(app, "/v1/completions", services, CompletionsApi(services))
    _add_generation_route(app, "/v1/responses", services, ResponsesApi(services))
    return app


def _middleware(config: ServerConfig, running: RunningRequests) -> list[Middleware]:
    """From the outside in. Browsers must be able to read a 401 too, so CORS stands before the keys."""
    middleware = [Middleware(TurnstileMiddleware), Middleware(RequestIdMiddleware)]
    if config.allowed_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.allowed_origins,
                allow_methods=["GET", "HEAD", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )
        )
    if config.api_keys:
        open_paths = OPEN_PATHS | PAGE_PATHS
        if not config.metrics_need_key:
            open_paths |= {"/metrics"}
        middleware.append(Middleware(ApiKeyMiddleware, api_keys=config.api_keys, open_paths=open_paths))
    return [*middleware, Middleware(AbortMiddleware, running=running)]


def _add_generation_route(app: FastAPI, path: str, services: Services, api: GenerationApi) -> None:
    async def generate() -> Response:
        return GenerationResponse(services, api)

    app.add_api_route(path, generate, methods=["POST"], response_model=None)


def _dialect(config: ServerConfig, template: PromptTemplate | None) -> Dialect | None:
    if template is None:
        return None
    return Dialect.of(
        template, tool_call_parser=config.tool_call_parser, reasoning_parser=config.reasoning_parser
    )
