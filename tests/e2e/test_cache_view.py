"""/debug/cache of a whole server: what two requests leave in the tree, and nothing of what they said."""

from __future__ import annotations

from typing import Any

from support.served import ServedModel

SECRET = "a prompt that nobody else should read, long enough for a few windows of this tiny model. " * 4


def test_a_shared_prompt_is_one_node_that_was_hit(fragments: ServedModel) -> None:
    fragments.flush()
    fragments.complete(SECRET + "first", max_tokens=2, cache_salt="pepper")
    fragments.complete(SECRET + "second", max_tokens=2, cache_salt="pepper")
    fragments.complete("nothing in common", max_tokens=2)
    fragments.wait_idle()
    response = fragments.http.get("/debug/cache")
    assert response.status_code == 200
    assert "nobody" not in response.text and "pepper" not in response.text
    view = response.json()
    assert [root["namespace"] for root in view["tree"]] == [0, 1]
    nodes = [node for root in view["tree"] for node in all_nodes(root)]
    assert view["nodes"] == len(nodes) - 2
    assert view["omitted"] == {"nodes": 0, "full": 0, "swa": 0}
    for kind in ("full", "swa"):
        assert sum(node[kind] for node in nodes) == view["pools"][kind]["tree"] > 0
        assert fragments.pool(kind)["tree"] == view["pools"][kind]["tree"]
    (trunk,) = view["tree"][0]["children"]
    assert (trunk["hits"], trunk["locked"], len(trunk["children"])) == (1, 0, 2)
    assert trunk["tokens"] == trunk["full"] > 100
    fragments.flush()
    assert fragments.http.get("/debug/cache").json()["tree"] == []


def all_nodes(root: dict[str, Any]) -> list[dict[str, Any]]:
    nodes, waiting = [], [root]
    while waiting:
        node = waiting.pop()
        nodes.append(node)
        waiting.extend(node["children"])
    return nodes
