"""Everything that the routes of one server share, built once by create_app."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from forkpoint.configs.errors import EngineLoading
from forkpoint.configs.serving import ServerConfig
from forkpoint.scheduler.client import EngineClient
from forkpoint.scheduler.messages import EngineInfo
from forkpoint.server.generation import Generator
from forkpoint.server.lifecycle import Lifecycle
from forkpoint.server.limits import Limits
from forkpoint.server.live_requests import LiveRequests
from forkpoint.server.request_body import BodyReader
from forkpoint.server.request_metrics import RequestMetrics
from forkpoint.server.structured_check import GrammarChecks
from forkpoint.server.text_ports import PromptTemplate, TextTokenizer
from forkpoint.server.tools_dialect import Dialect
from forkpoint.server.tracing import Tracing


@dataclass(frozen=True, slots=True)
class Timing:
    """Intervals of the HTTP layer. keep_alive_s: silence in a stream before a comment is sent."""

    keep_alive_s: float = 10.0
    body_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Services:
    """created: Unix time at which the server started. template, dialect: None if the model has none."""

    config: ServerConfig
    engine: EngineClient
    tokenizer: TextTokenizer
    template: PromptTemplate | None
    dialect: Dialect | None
    grammars: GrammarChecks
    lifecycle: Lifecycle
    generator: Generator
    registry: CollectorRegistry
    metrics: RequestMetrics
    timing: Timing
    bodies: BodyReader
    created: int
    live_requests: LiveRequests
    tracing: Tracing

    @property
    def engine_info(self) -> EngineInfo:
        """Raises EngineLoading until the engine has been ready once."""
        info = self.engine.info
        if info is None:
            raise EngineLoading("the model is still loading", retry_after_s=2)
        return info

    @property
    def chat_end_token_ids(self) -> frozenset[int]:
        """What ends an answer in a chat: what the model's files name, and what its format ends with."""
        markers = self.dialect.end_markers if self.dialect is not None else ()
        ids = {self.tokenizer.special_token_id(marker) for marker in markers}
        return self.tokenizer.eos_token_ids | {token_id for token_id in ids if token_id is not None}

    @property
    def limits(self) -> Limits:
        return Limits(self.engine_info)
