"""/debug/cache: the tree as nested JSON, its limit, its guard, and nothing private in it."""

from __future__ import annotations

import pytest
from support.fake_engine import FakeEngine
from support.http_server import error_of, serving

from forkpoint.cache.description import NodeDescription, TreeDescription, WindowDescription
from forkpoint.scheduler.client import EngineState


def node(parent: int | None, tokens: int, *, left_out: int = 0) -> NodeDescription:
    windows = (WindowDescription(tokens, 32, "branch", 3),) if parent is not None else ()
    return NodeDescription(
        parent,
        tokens,
        full=tokens,
        swa=tokens // 2,
        locked_full=tokens,
        locked_swa=tokens // 4,
        hits=5,
        left_out=left_out,
        windows=windows,
    )


TREE = TreeDescription(
    (node(None, 0), node(None, 0), node(0, 64), node(1, 48), node(2, 16, left_out=9), node(2, 32)), 9, 144, 16
)


def test_nodes_are_nested_below_the_roots_of_their_namespaces() -> None:
    with serving(FakeEngine(tree=TREE)) as world:
        world.complete(max_tokens=1)  # the fake engine's pools have figures after a step
        body = world.http.get("/debug/cache").json()
    assert (body["page_size"], body["window"], body["nodes"]) == (16, 64, 4)
    assert body["omitted"] == {"nodes": 9, "full": 144, "swa": 16}
    assert body["pools"]["full"] == {
        "free": 3000, "tree": 1000, "locked": 200, "leased": 96, "capacity": 4096
    }  # fmt: skip
    first, second = body["tree"]
    assert (first["namespace"], second["namespace"]) == (0, 1)
    assert [child["tokens"] for child in second["children"]] == [48]
    (trunk,) = first["children"]
    assert {**trunk, "children": None} == {
        "tokens": 64,
        "full": 64,
        "swa": 32,
        "locked": 64,
        "locked_swa": 16,
        "hits": 5,
        "windows": [{"end": 64, "tokens": 32, "window_class": "branch", "hits": 3}],
        "left_out": 0,
        "children": None,
    }
    assert [(child["tokens"], child["left_out"]) for child in trunk["children"]] == [(16, 9), (32, 0)]


def test_the_number_of_nodes_is_limited() -> None:
    with serving() as world:
        assert world.http.get("/debug/cache").json()["tree"] == []
        assert world.http.get("/debug/cache?max_nodes=17").status_code == 200
        assert world.engine.described_max_nodes == [2000, 17]


@pytest.mark.parametrize("value", ["0", "-1", "10001", "1e3", "", "x", "9" * 5000, "２"])
def test_a_limit_that_is_no_number_or_too_large_is_refused(value: str) -> None:
    with serving() as world:
        response = world.http.get("/debug/cache", params={"max_nodes": value})
        assert error_of(response, 400)["param"] == "max_nodes"
        assert world.engine.described_max_nodes == []


def test_it_needs_the_key_and_an_engine() -> None:
    with serving(api_keys=("secret",)) as world:
        assert error_of(world.http.get("/debug/cache"), 401)["code"] == "invalid_api_key"
    with serving(FakeEngine(state=EngineState.LOADING)) as world:
        error_of(world.http.get("/debug/cache"), 503)


def test_a_tree_as_deep_as_the_engine_shows_can_be_parsed() -> None:
    chain = TreeDescription((node(None, 0), *(node(index, 16) for index in range(100))), 0, 0, 0)
    with serving(FakeEngine(tree=chain)) as world:
        (here,) = world.http.get("/debug/cache").json()["tree"]
    depth = 0
    while here["children"]:
        (here,) = here["children"]
        depth += 1
    assert depth == 100
