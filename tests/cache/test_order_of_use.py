"""Which leaves full pressure takes, and that long running sequences are not looked through each time."""

from __future__ import annotations

import numpy as np

from forkpoint.cache.tree import Node, RadixTree, SwaSpan


def add(tree: RadixTree, parent: Node, token: int) -> Node:
    one = np.array([token], dtype=np.int32)
    return tree.add_leaf(parent, one, one, SwaSpan.dead(1))


def tree_with_a_running_sequence(num_nodes: int) -> tuple[RadixTree, list[Node]]:
    """A pinned chain, and three leaves that were used after it, oldest first."""
    tree = RadixTree(page_size=1)
    node: Node = tree.root("")
    for token in range(num_nodes):
        node = add(tree, node, token)
        node.pins = 1
    return tree, [add(tree, tree.root(""), 1000 + index) for index in range(3)]


def test_pinned_nodes_are_passed_over_once_and_not_at_each_eviction() -> None:
    tree, leaves = tree_with_a_running_sequence(200)
    first = next(tree.unpinned_leaves())
    assert first is leaves[0]
    tree.remove_leaf(first)
    assert next(iter(tree.recency)) is leaves[1], "the next eviction looks at 200 pinned nodes again"


def test_leaves_go_oldest_first_until_only_pinned_nodes_are_left() -> None:
    tree, leaves = tree_with_a_running_sequence(40)
    taken = []
    for leaf in tree.unpinned_leaves():
        taken.append(leaf)
        tree.remove_leaf(leaf)
    assert taken == leaves
    rank = {node: index for index, node in enumerate(tree.recency)}
    assert len(rank) == 40
    assert all(node.parent is None or node.parent.is_root or rank[node] < rank[node.parent] for node in rank)
