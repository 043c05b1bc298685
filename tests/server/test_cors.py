"""CORS: nothing by default; for the origins that were allowed, preflights without the key."""

from __future__ import annotations

import httpx2
import pytest
from support.http_server import World, error_of, serving

PAGE = "https://page.example"


def preflight(world: World, path: str, origin: str = PAGE) -> httpx2.Response:
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type",
    }
    return world.http.options(path, headers=headers)


def test_no_page_is_allowed_by_default() -> None:
    with serving() as world:
        error_of(preflight(world, "/v1/chat/completions"), 405)
        response = world.http.get("/v1/models", headers={"origin": PAGE})
        assert response.status_code == 200
        assert not [name for name in response.headers if name.startswith("access-control")]


def test_options_are_never_asked_for_the_key() -> None:
    with serving(api_keys=("secret",)) as world:
        error_of(preflight(world, "/v1/chat/completions"), 405)
        error_of(world.http.options("/metrics"), 405)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/flush_cache", "/unknown"])
def test_a_preflight_of_an_allowed_page_needs_no_key(path: str) -> None:
    with serving(allowed_origins=(PAGE,), api_keys=("secret",)) as world:
        response = preflight(world, path)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == PAGE
        assert "POST" in response.headers["access-control-allow-methods"]
        assert "authorization" in response.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in response.headers
        assert world.engine.num_flushes == 0


def test_other_pages_are_not_allowed() -> None:
    with serving(allowed_origins=(PAGE,)) as world:
        for response in (
            preflight(world, "/v1/models", "https://other.example"),
            world.http.get("/v1/models", headers={"origin": "https://other.example"}),
        ):
            assert "access-control-allow-origin" not in response.headers


def test_answers_and_refusals_can_be_read_by_the_page() -> None:
    with serving(allowed_origins=(PAGE,), api_keys=("secret",)) as world:
        refused = world.http.get("/v1/models", headers={"origin": PAGE})
        error_of(refused, 401)
        served = world.http.get("/v1/models", headers={"origin": PAGE, "authorization": "Bearer secret"})
        assert served.status_code == 200
        for response in (refused, served):
            assert response.headers["access-control-allow-origin"] == PAGE
            assert "x-request-id" in response.headers["access-control-expose-headers"]


def test_a_star_allows_every_page() -> None:
    with serving(allowed_origins=("*",)) as world:
        response = world.http.get("/v1/models", headers={"origin": "https://any.example"})
        assert response.headers["access-control-allow-origin"] == "*"
