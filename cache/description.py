"""What the tree looks like from outside: per node how many tokens, how much of it is live, locked and used.

Counts only: token ids are somebody's prompt, and the name of a namespace may be a secret.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice

import numpy as np

from forkpoint.cache.tree import Node, RadixTree, Window, WindowClass

# A conversation adds a node per turn. JSON parsers give up between 250 and 1,000 levels of nesting, and a
# node takes two of them.
MAX_DEPTH = 100


@dataclass(frozen=True, slots=True)
class WindowDescription:
    """A kept window: end and length in tokens, end counted from the start of the sequence; why; its use."""

    end: int
    tokens: int
    window_class: WindowClass
    hits: int


@dataclass(frozen=True, slots=True)
class NodeDescription:
    """One node. parent: index of its parent in TreeDescription.nodes; None for the root of a namespace.

    All in tokens of this node: full and swa are live, locked_full and locked_swa are those that running
    sequences need. hits: how often a request reused it. left_out: children that are not described.
    """

    parent: int | None
    tokens: int
    full: int
    swa: int
    locked_full: int
    locked_swa: int
    hits: int
    left_out: int
    windows: tuple[WindowDescription, ...]


@dataclass(frozen=True, slots=True)
class TreeDescription:
    """Nodes in breadth-first order, so that a parent comes before its children, and what is left out of it.

    Namespaces are the nodes without a parent, in order of first use.
    """

    nodes: tuple[NodeDescription, ...]
    omitted_nodes: int
    omitted_full: int
    omitted_swa: int


def describe_tree(
    tree: RadixTree, *, max_nodes: int, full_pages: int, swa_pages: int, max_depth: int = MAX_DEPTH
) -> TreeDescription:
    """The nodes that lie nearest to the roots, at most max_nodes and to max_depth below a root.

    full_pages, swa_pages: what the tree holds in all; the rest of it is reported without visiting it, so that
    the time depends on max_nodes only. Changes nothing.
    """
    size = tree.page_size
    roots = islice(tree.roots.values(), max_nodes)
    waiting: deque[tuple[Node, int | None, int]] = deque((root, None, 0) for root in roots)
    budget = max_nodes - len(waiting)
    nodes: list[NodeDescription] = []
    while waiting:
        node, parent, depth = waiting.popleft()
        shown = min(budget, len(node.children)) if depth < max_depth else 0
        budget -= shown
        waiting.extend((child, len(nodes), depth + 1) for child in islice(node.children.values(), shown))
        nodes.append(_describe(node, parent, size, left_out=len(node.children) - shown))
    num_described = sum(node.parent is not None for node in nodes)
    return TreeDescription(
        nodes=tuple(nodes),
        omitted_nodes=len(tree.recency) - num_described,
        omitted_full=full_pages * size - sum(node.full for node in nodes),
        omitted_swa=swa_pages * size - sum(node.swa for node in nodes),
    )


def _describe(node: Node, parent: int | None, page_size: int, *, left_out: int) -> NodeDescription:
    span = node.swa
    tokens = node.num_pages * page_size
    return NodeDescription(
        parent=parent,
        tokens=tokens,
        full=tokens,
        swa=int(np.count_nonzero(span.pages)) * page_size,
        locked_full=tokens if node.pins else 0,
        locked_swa=int(np.count_nonzero(span.locks)) * page_size,
        hits=node.hits,
        left_out=left_out,
        windows=tuple(_describe_window(window, page_size) for window in span.windows.values()),
    )


def _describe_window(window: Window, page_size: int) -> WindowDescription:
    return WindowDescription(
        end=window.end_page * page_size,
        tokens=window.num_pages * page_size,
        window_class=window.window_class,
        hits=window.hits,
    )
