"""What the page and `forkpoint top` read while the server works: /debug/steps and /debug/requests.

Both are answered from what the API process knows anyway: the engine is not asked.
"""

from __future__ import annotations

import time

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from forkpoint.configs.errors import RequestError
from forkpoint.server.engine_metrics import EngineMetrics
from forkpoint.server.services import Services
from forkpoint.server.step_log import StepLog

MAX_LISTED_REQUESTS = 200
MAX_STEP_NUMBER = 10**15 - 1


def live_view_routes(services: Services, metrics: EngineMetrics, steps: StepLog) -> APIRouter:
    """GET /debug/steps?after=N: the latest steps with a number above N, gauges and counters as of now.

    GET /debug/requests: the generation requests under way, oldest first, at most MAX_LISTED_REQUESTS.
    """
    router = APIRouter()

    async def show_steps(request: Request) -> Response:
        after = _after(request)
        stats = services.engine.stats
        return _json(
            {
                "now": time.time(),
                "state": _state(services),
                "running": stats.running,
                "waiting": stats.waiting,
                "pools": {"full": stats.full._asdict(), "swa": stats.swa._asdict()},
                "totals": metrics.totals().counts,
                "restarts": services.engine.num_restarts,
                "last": steps.last,
                "steps": steps.after(after),
            }
        )

    async def show_requests() -> Response:
        requests = services.live_requests
        listed = requests.oldest(MAX_LISTED_REQUESTS)
        return _json({"requests": listed, "left_out": len(requests) - len(listed)})

    router.add_api_route("/debug/steps", show_steps, methods=["GET"], response_model=None)
    router.add_api_route("/debug/requests", show_requests, methods=["GET"], response_model=None)
    return router


def _state(services: Services) -> str:
    return "draining" if services.lifecycle.is_draining else services.engine.state.value


def _after(request: Request) -> int:
    value = request.query_params.get("after", "0")
    if not (value.isascii() and value.isdigit() and len(value) <= 15):
        raise RequestError(f"after is {value[:40]!r}; it must be the number of a step, or 0", param="after")
    return int(value)


def _json(content: object) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")
