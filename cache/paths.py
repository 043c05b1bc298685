"""Stretches of pages along the path to a node, as slices of the nodes that hold them."""

from __future__ import annotations

from collections.abc import Iterator

from forkpoint.cache.tree import Node, Window


def segments(tip: Node, start: int, end: int) -> Iterator[tuple[Node, slice]]:
    """The parts of nodes on the path to `tip` that cover pages start..end, the deepest first."""
    # The innermost loop of the cache: plain comparisons, for a property or a call costs what numpy costs.
    node = tip
    end = min(end, tip.end_page)
    while start < end:
        assert node.parent is not None
        first = node.start_page
        if first < end:
            yield node, slice(start - first if start > first else 0, end - first)
            end = first
        node = node.parent


def window_segments(window: Window) -> Iterator[tuple[Node, slice]]:
    """The parts of nodes that a kept window refers to, the deepest first."""
    return segments(window.node, window.end_page - window.num_pages, window.end_page)


def owner_of(tip: Node, end: int) -> Node:
    """The node on the path to `tip` in which page number `end` - 1 lies."""
    node = tip
    while node.start_page >= end:
        assert node.parent is not None, f"page {end} is not below the tip"
        node = node.parent
    return node
