"""The small routes: models, version, cache flush, probes, request ids."""

from __future__ import annotations

import openai
import pytest
from support.fake_engine import FakeEngine
from support.http_server import MODEL, error_of, raw_request, serving


def test_every_served_name_is_a_model() -> None:
    with serving() as world:
        first = world.http.get("/v1/models").json()
        assert first == world.http.get("/v1/models").json()  # `created` is the start of the server
        assert first["object"] == "list"
        assert [card["id"] for card in first["data"]] == [MODEL, "alias"]
        for card in first["data"]:
            assert card["object"] == "model"
            assert isinstance(card["created"], int)
            assert isinstance(card["owned_by"], str)
            assert card["max_model_len"] == 2048


def test_model_with_a_slash_is_found_raw_and_escaped() -> None:
    with serving() as world:
        assert world.openai.models.retrieve(MODEL).id == MODEL
        assert world.http.get("/v1/models/org/tiny").json()["id"] == MODEL
        assert world.http.get("/v1/models/org%2Ftiny").json()["id"] == MODEL
        with pytest.raises(openai.NotFoundError) as caught:
            world.openai.models.retrieve("org/other")
        assert caught.value.code == "model_not_found"


def test_version() -> None:
    with serving() as world:
        assert world.http.get("/version").json() == {"version": "0.1.0"}


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_the_server_tells_what_it_serves_and_no_secret(path: str) -> None:
    with serving(api_keys=("topsecret",)) as world:
        response = world.http.get(path, headers={"authorization": "Bearer topsecret"})
        info = response.json()
        assert info["version"] == "0.1.0"
        assert info["served_model_names"] == [MODEL, "alias"]
        assert (info["context_length"], info["page_size"], info["window"]) == (2048, 16, 64)
        assert "topsecret" not in response.text


def test_embeddings_are_refused_once_and_for_all() -> None:
    with serving() as world:
        response = world.http.post("/v1/embeddings", json={"model": MODEL, "input": "x"})
        assert error_of(response, 501)["code"] == "not_supported"
        assert response.headers["x-should-retry"] == "false"
        with pytest.raises(openai.APIStatusError) as caught:
            world.openai.embeddings.create(model=MODEL, input="x")
        assert caught.value.status_code == 501


@pytest.mark.parametrize("path", ["/flush_cache", "/reset_prefix_cache"])
def test_cache_is_flushed_when_idle_and_not_while_in_use(path: str) -> None:
    with serving(FakeEngine(is_held=True)) as world:
        assert world.http.post(path).json() == {"success": True}
        with raw_request(world.url, "/v1/completions", {"prompt": "hi"}):
            world.engine.until(lambda: world.engine.submits)
            assert error_of(world.http.post(path), 409)["code"] == "cache_in_use"
        assert world.engine.num_flushes == 1


def test_engine_that_is_stuck_in_a_step_is_not_healthy() -> None:
    with serving() as world:
        assert world.http.get("/health").status_code == 200
        world.engine.seconds_since_step = 61.0
        assert "61 s" in error_of(world.http.get("/health"), 503)["message"]
        world.engine.seconds_since_step = 59.0
        assert world.http.get("/health").status_code == 200


@pytest.mark.parametrize(
    "path", ["/health", "/livez", "/ready", "/readyz", "/metrics", "/v1/models", "/server_info"]
)
def test_head_is_answered_without_a_body(path: str) -> None:
    with serving() as world:
        response = world.http.head(path)
        assert (response.status_code, response.content) == (200, b"")


def test_sane_request_id_is_echoed_and_others_are_replaced() -> None:
    with serving() as world:
        for path, status in (("/v1/models", 200), ("/unknown", 404)):
            response = world.http.get(path, headers={"x-request-id": "abc-123.x:Y_z"})
            assert response.status_code == status
            assert response.headers["x-request-id"] == "abc-123.x:Y_z"
        made = {
            world.http.get("/livez", headers={"x-request-id": bad}).headers["x-request-id"]
            for bad in ("", "two words", "x" * 129, "a/b")
        }
        assert len(made) == 4
        assert all(len(each) == 32 for each in made)
