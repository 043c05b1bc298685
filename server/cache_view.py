"""/debug/cache: the prefix tree as nested JSON. Counts only: prompts and names of namespaces are private."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from forkpoint.configs.errors import RequestError
from forkpoint.scheduler.messages import CacheDescribed, EngineInfo
from forkpoint.server.services import Services

DEFAULT_NODES = 2_000
# The engine spends 10 to 25 us on a node, between two steps (November 2026, two busy cores).
MAX_NODES = 10_000


def cache_view_routes(services: Services) -> APIRouter:
    """GET /debug/cache?max_nodes=N: the N nodes nearest to the roots, and the count of the others."""
    router = APIRouter()

    async def show_cache(request: Request) -> Response:
        max_nodes = _max_nodes(request)
        services.lifecycle.require_serving()
        described = await services.engine.describe_cache(max_nodes)
        body = await asyncio.to_thread(_json_of, described, services.engine_info)
        return Response(body, media_type="application/json")

    router.add_api_route("/debug/cache", show_cache, methods=["GET"], response_model=None)
    return router


def _json_of(described: CacheDescribed, info: EngineInfo) -> bytes:
    """Geometry, pools, and a node for the root of each namespace with all others nested below it.

    Every figure of a node is in tokens, but for hits and left_out (children that are not shown).
    """
    tree, stats = described.tree, described.stats
    roots: list[dict[str, Any]] = []
    views: list[dict[str, Any]] = []
    # A parent comes before its children, so no recursion is needed to nest them.
    for node in tree.nodes:
        view: dict[str, Any] = {
            "tokens": node.tokens,
            "full": node.full,
            "swa": node.swa,
            "locked": node.locked_full,
            "locked_swa": node.locked_swa,
            "hits": node.hits,
            "windows": node.windows,
            "left_out": node.left_out,
            "children": [],
        }
        views.append(view)
        if node.parent is None:
            view["namespace"] = len(roots)
            roots.append(view)
        else:
            views[node.parent]["children"].append(view)
    return orjson.dumps(
        {
            "page_size": info.page_size,
            "window": info.window,
            "pools": {"full": stats.full._asdict(), "swa": stats.swa._asdict()},
            "nodes": len(tree.nodes) - len(roots),
            "omitted": {"nodes": tree.omitted_nodes, "full": tree.omitted_full, "swa": tree.omitted_swa},
            "tree": roots,
        }
    )


def _max_nodes(request: Request) -> int:
    value = request.query_params.get("max_nodes", str(DEFAULT_NODES))
    # Nine digits at most: int() of a million digits would take seconds.
    is_number = value.isascii() and value.isdigit() and len(value) <= 9
    if not is_number or not 1 <= int(value) <= MAX_NODES:
        raise RequestError(
            f"max_nodes is {value[:40]!r}; it must be a whole number from 1 to {MAX_NODES}", param="max_nodes"
        )
    return int(value)
