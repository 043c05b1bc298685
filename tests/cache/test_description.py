"""The description of the tree: it adds up to the pools, counts hits and locks, and stays small."""

from __future__ import annotations

import numpy as np

from forkpoint.cache import CacheGeometry, PrefixCache
from forkpoint.cache.description import NodeDescription, TreeDescription
from forkpoint.cache.lease import Lease

P, WINDOW = 4, 8


def cache() -> PrefixCache:
    return PrefixCache(CacheGeometry(P, WINDOW), full_pages=20_000, swa_pages=20_000)


def begin(cache: PrefixCache, tokens: list[int], namespace: str = "") -> Lease:
    """A sequence that has computed all its tokens and still runs."""
    array = np.array(tokens, dtype=np.int32)
    lease = cache.acquire(cache.match(array, namespace), prompt_len=len(array))
    cache.extend(lease, len(array))
    cache.commit(lease, array, len(array))
    return lease


def run(cache: PrefixCache, tokens: list[int], namespace: str = "") -> None:
    lease = begin(cache, tokens, namespace)
    cache.release(lease, np.array(tokens, dtype=np.int32), len(tokens))


def numbered(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def children_of(tree: TreeDescription, parent: int) -> list[NodeDescription]:
    return [node for node in tree.nodes if node.parent == parent]


def test_nodes_add_up_to_what_the_pools_hold() -> None:
    made = cache()
    shared = numbered(0, 40)
    for salt in ("", "salt:a"):
        for branch in (100, 200, 300):
            run(made, shared + numbered(branch, 24), salt)
    tree = made.describe(max_nodes=1000)
    assert [node.parent for node in tree.nodes[:2]] == [None, None], "one root for each namespace"
    assert sum(node.full for node in tree.nodes) == made.full_use.tree * P == 2 * (40 + 3 * 24)
    assert made.swa_use is not None
    assert sum(node.swa for node in tree.nodes) == made.swa_use.tree * P > 0
    assert (tree.omitted_nodes, tree.omitted_full, tree.omitted_swa) == (0, 0, 0)
    trunk = children_of(tree, 0)
    assert [node.tokens for node in trunk] == [40]
    assert [node.tokens for node in children_of(tree, tree.nodes.index(trunk[0]))] == [24, 24, 24]


def test_hits_count_the_sequences_that_borrowed_a_node_and_survive_its_split() -> None:
    made = cache()
    long = numbered(0, 40)
    run(made, [*long, 7])  # makes it: no hit
    run(made, [*long, 8])
    run(made, [*long, 9])
    run(made, [*long[:20], 99])  # splits it
    tree = made.describe(max_nodes=10)
    upper = children_of(tree, 0)[0]
    lower = children_of(tree, 1)[0]
    assert (upper.tokens, upper.hits) == (20, 3)
    assert (lower.tokens, lower.hits) == (20, 2)


def test_what_running_sequences_need_is_locked_until_they_end() -> None:
    made = cache()
    tokens = numbered(0, 48)
    lease = begin(made, tokens)
    node = made.describe(max_nodes=10).nodes[1]
    assert made.swa_use is not None
    assert (node.locked_full, node.locked_swa) == (48, made.swa_use.locked * P)
    assert node.locked_swa > 0
    made.release(lease, np.array(tokens, dtype=np.int32), 48)
    node = made.describe(max_nodes=10).nodes[1]
    assert (node.locked_full, node.locked_swa) == (0, 0)
    assert [(window.end, window.window_class) for window in node.windows] == [(48, "prompt_tail")]
    assert node.windows[0].tokens == node.swa


def test_a_wide_tree_is_cut_at_the_limit_and_the_rest_is_counted() -> None:
    made = cache()
    for branch in range(50):
        run(made, numbered(1000 * branch, 12))
    tree = made.describe(max_nodes=11)
    assert len(tree.nodes) == 11
    assert (tree.nodes[0].left_out, tree.omitted_nodes) == (40, 40)
    assert tree.omitted_full == 40 * 12
    assert tree.omitted_swa == 40 * tree.nodes[1].swa > 0


def test_more_namespaces_than_the_limit_do_not_break_it() -> None:
    made = cache()
    for index in range(5):
        run(made, numbered(0, 12), f"salt:{index}")
    tree = made.describe(max_nodes=3)
    assert [(node.parent, node.left_out) for node in tree.nodes] == [(None, 1)] * 3
    assert (tree.omitted_nodes, tree.omitted_full) == (5, 60)


def test_a_tree_hundreds_of_nodes_deep_is_described_without_recursion() -> None:
    made = cache()
    tokens = numbered(0, 600 * P)
    for num_pages in range(1, 601):
        lease = begin(made, tokens[: num_pages * P])
        made.release(lease, np.array(tokens, dtype=np.int32), num_pages * P)
    tree = made.describe(max_nodes=100_000)
    assert len(tree.nodes) == 101
    assert tree.nodes[-1].left_out == 1
    assert tree.omitted_nodes == 500
    assert tree.omitted_full == 500 * P
