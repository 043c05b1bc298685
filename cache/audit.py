"""Recount of all that a cache claims: each page in exactly one place, each counter equal to its sum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from forkpoint.cache.pages import PageIds, PagePool
from forkpoint.cache.tree import Node, RadixTree


class AuditError(AssertionError):
    """The cache contradicts itself: a bug of ours, never of a request."""


def audit_pages(pool: PagePool, places: Iterable[PageIds]) -> None:
    """Every page id of `pool` must appear exactly once over the free list and `places`."""
    pages = np.concatenate([pool.free_pages(), *places])
    if len(pages) and (pages.min() < 1 or pages.max() > pool.capacity):
        raise AuditError(f"{pool.kind}: a page id outside 1..{pool.capacity} is in use")
    seen = np.bincount(pages, minlength=pool.capacity + 1)
    wrong = np.flatnonzero(seen[1:] != 1) + 1
    if len(wrong):
        counts = {int(page): int(seen[page]) for page in wrong[:8]}
        raise AuditError(f"{pool.kind}: page id -> places it is in (must be 1): {counts}")


def audit_structure(tree: RadixTree, lease_tips: Sequence[Node]) -> list[Node]:
    """Check parents, keys, page counts, pins and the order of use; returns all nodes but the roots."""
    found: list[Node] = []
    own_pins: dict[int, int] = {}
    for tip in lease_tips:
        own_pins[id(tip)] = own_pins.get(id(tip), 0) + 1
    stack: list[Node] = list(tree.roots.values())
    rank = {id(node): index for index, node in enumerate(tree.recency)}
    while stack:
        node = stack.pop()
        _audit_node(tree, node)
        pins = own_pins.pop(id(node), 0) + sum(1 for child in node.children.values() if child.pins)
        if pins != node.pins:
            raise AuditError(f"node at page {node.start_page}: pins {node.pins}, recount {pins}")
        for child in node.children.values():
            if child.parent is not node:
                raise AuditError(f"node at page {child.start_page}: wrong parent")
            if not node.is_root and rank[id(node)] < rank[id(child)]:
                raise AuditError(f"node at page {node.start_page}: used less recently than its child")
            stack.append(child)
        if not node.is_root:
            found.append(node)
    if own_pins:
        raise AuditError(f"{len(own_pins)} lease tips are not in the tree")
    if len(found) != len(rank):
        raise AuditError(f"{len(rank)} nodes in the order of use, {len(found)} in the tree")
    return found


def _audit_node(tree: RadixTree, node: Node) -> None:
    where = f"node at page {node.start_page}"
    if len(node.tokens) != node.num_pages * tree.page_size:
        raise AuditError(f"{where}: {len(node.tokens)} tokens in {node.num_pages} pages")
    if not node.is_root and not node.num_pages:
        raise AuditError(f"{where}: empty")
    span = node.swa
    if not len(span.pages) == len(span.refs) == len(span.locks) == node.num_pages:
        raise AuditError(f"{where}: SWA arrays differ in length from {node.num_pages} pages")
    for key, child in node.children.items():
        if tree.key(child.tokens, 0) != key:
            raise AuditError(f"{where}: child filed under a wrong key")
        if child.start_page != node.end_page:
            raise AuditError(f"{where}: child starts at page {child.start_page}, not {node.end_page}")
