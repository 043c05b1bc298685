"""Stretches of pages along the path to a node, as slices of the nodes that hold them."""

from __future__ import annotations

from collections.abc import Iterator

from forkpoint.cache.tree import Node, Window


def segments(tip: Node, start: int, end: int) -> Iterator[tuple[Node, slice]]:
    """The parts of nodes on the path to `tip` that cover pages start..end, the deepest first."""
    if start >= end:
        return
    for node in tip.up_to_root():
        if node.start_page < end:
            low, high = max(start, node.start_page), min(end, node.end_page)
            yield node, slice(low - node.start_page, high - node.start_page)
        if node.start_page <= start:
            return


def window_segments(window: Window) -> Iterator[tuple[Node, slice]]:
    """The parts of nodes that a kept window refers to, the deepest first."""
    return segments(window.node, window.end_page - window.num_pages, window.end_page)


def owner_of(tip: Node, end: int) -> Node:
    """The node on the path to `tip` in which page number `end` - 1 lies."""
    for node in tip.up_to_root():
        if node.start_page < end:
            return node
    raise AssertionError(f"page {end} is not below the tip")
