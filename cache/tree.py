"""A radix tree over pages of token ids: nodes, the walk, the split, and the order of last use.

The tree holds page ids of each kind per page and counts, but frees nothing itself: components do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from forkpoint.cache.pages import PageIds

Tokens = NDArray[np.int32]
ChildKey = int | bytes
# Why a window is kept: an anchor known in advance, the end of a prompt or of a finished sequence, or a place
# where a request was seen to fork.
WindowClass = Literal["system_anchor", "message_anchor", "prompt_tail", "finish_tail", "branch"]
Counts = NDArray[np.int32]


@dataclass(slots=True, eq=False)
class Window:
    """A kept SWA window: the num_pages pages that end before page index end_page, on the path of `node`.

    Mutable: a split moves it to another node, it grows when more pages below it become live, and it is hit.
    hits: requests that resumed from it. last_use: when, in SWA pages allocated so far.
    """

    node: Node
    end_page: int
    num_pages: int
    window_class: WindowClass
    hits: int = 0
    last_use: int = 0


@dataclass(slots=True, eq=False)
class SwaSpan:
    """SWA state of one node, per page: id (0: tombstone), windows that refer to it, leases that lock it."""

    pages: PageIds
    refs: Counts
    locks: Counts
    windows: dict[int, Window] = field(default_factory=dict)

    @staticmethod
    def dead(num_pages: int) -> SwaSpan:
        zeros = np.zeros((3, num_pages), dtype=np.int32)
        return SwaSpan(zeros[0], zeros[1], zeros[2])


class Node:
    """One edge of the tree and the node below it: a run of whole pages. Mutable: it is split and pinned.

    start_page: index of its first page in the sequence. pins: leases whose tip is this node, plus children
    with pins; a node with pins > 0 lies on the path of a running sequence and is never evicted.
    hits: how often a sequence borrowed it.
    """

    __slots__ = ("children", "full_pages", "hits", "parent", "pins", "start_page", "swa", "tokens")

    def __init__(
        self, parent: Node | None, start_page: int, tokens: Tokens, full_pages: PageIds, swa: SwaSpan
    ) -> None:
        self.parent = parent
        self.start_page = start_page
        self.tokens = tokens
        self.full_pages = full_pages
        self.swa = swa
        self.children: dict[ChildKey, Node] = {}
        self.pins = 0
        self.hits = 0

    @property
    def num_pages(self) -> int:
        return len(self.full_pages)

    @property
    def end_page(self) -> int:
        return self.start_page + len(self.full_pages)

    @property
    def is_root(self) -> bool:
        return self.parent is None

    def up_to_root(self) -> Iterator[Node]:
        """This node and its ancestors, the root excluded."""
        node: Node = self
        while node.parent is not None:
            yield node
            node = node.parent


class Root(Node):
    """The top of one namespace: no pages, never evicted, gone when it has neither children nor pins."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: str) -> None:
        empty = np.zeros(0, dtype=np.int32)
        super().__init__(None, 0, empty, empty, SwaSpan.dead(0))
        self.namespace = namespace


class RadixTree:
    """Namespaces of token prefixes. Two namespaces never share a node.

    `recency` holds every node but the roots, least recently used first; a parent always comes after its
    children, so the oldest unpinned node is a leaf.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.roots: dict[str, Root] = {}
        self.recency: OrderedDict[Node, None] = OrderedDict()

    def root(self, namespace: str) -> Root:
        """The root of a namespace, made when missing."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Root(namespace)
        return root

    def key(self, tokens: Tokens, page: int) -> ChildKey:
        """What a child that begins with tokens' page number `page` is filed under."""
        if self.page_size == 1:
            return int(tokens[page])
        return tokens[page * self.page_size : (page + 1) * self.page_size].tobytes()

    def common_pages(self, node: Node, tokens: Tokens, page: int, end_page: int) -> int:
        """How many whole pages of `node` equal tokens' pages from `page` on, up to end_page."""
        size = self.page_size
        start, count = page * size, min(len(node.tokens), (end_page - page) * size)
        if not count:
            return 0
        differs = node.tokens[:count] != tokens[start : start + count]
        first = int(differs.argmax())
        return (first if differs[first] else count) // size

    def walk(self, tokens: Tokens, num_pages: int, namespace: str) -> tuple[list[Node], int]:
        """Nodes below the root that share a prefix with tokens, and how many pages they share."""
        root = self.roots.get(namespace)
        path: list[Node] = []
        if root is None:
            return path, 0
        node: Node = root
        page = 0
        while page < num_pages:
            child = node.children.get(self.key(tokens, page))
            if child is None:
                break
            shared = self.common_pages(child, tokens, page, num_pages)
            path.append(child)
            page += shared
            if shared < len(child.full_pages):
                break
            node = child
        return path, page

    def touch(self, node: Node) -> None:
        """Mark the path to `node` as just used, ancestors last. O(depth)."""
        move_to_end = self.recency.move_to_end
        step = node
        while step.parent is not None:
            move_to_end(step)
            step = step.parent

    def add_leaf(self, parent: Node, tokens: Tokens, full_pages: PageIds, swa: SwaSpan) -> Node:
        """A new child of `parent` that owns copies of tokens and full_pages; it becomes the newest."""
        leaf = Node(parent, parent.end_page, tokens.copy(), full_pages.copy(), swa)
        parent.children[self.key(leaf.tokens, 0)] = leaf
        self.recency[leaf] = None
        self.touch(leaf)
        return leaf

    def split(self, node: Node, num_pages: int) -> Node:
        """Cut `node` after its first num_pages pages; returns the new upper half.

        `node` stays the lower half, so leases whose tip it is remain right.
        """
        assert 0 < num_pages < node.num_pages and node.parent is not None
        cut = num_pages * self.page_size
        span = node.swa
        upper_span = SwaSpan(
            span.pages[:num_pages].copy(), span.refs[:num_pages].copy(), span.locks[:num_pages].copy()
        )
        upper = Node(
            node.parent,
            node.start_page,
            node.tokens[:cut].copy(),
            node.full_pages[:num_pages].copy(),
            upper_span,
        )
        upper.pins = 1 if node.pins else 0
        upper.hits = node.hits
        node.parent.children[self.key(upper.tokens, 0)] = upper

        node.tokens = node.tokens[cut:].copy()
        node.full_pages = node.full_pages[num_pages:].copy()
        node.swa = SwaSpan(
            span.pages[num_pages:].copy(), span.refs[num_pages:].copy(), span.locks[num_pages:].copy()
        )
        node.start_page = upper.end_page
        node.parent = upper
        upper.children[self.key(node.tokens, 0)] = node
        for end_page, window in span.windows.items():
            owner = upper if end_page <= upper.end_page else node
            owner.swa.windows[end_page] = window
            window.node = owner

        # A split happens on a path that is being used, so the upper half may become the newest at once.
        self.recency[upper] = None
        self.touch(upper)
        return upper

    def remove_leaf(self, leaf: Node) -> None:
        """Take a leaf without pins out of the tree; its pages have been freed by the components."""
        assert not leaf.children and not leaf.pins and leaf.parent is not None
        del leaf.parent.children[self.key(leaf.tokens, 0)]
        del self.recency[leaf]
        # The leaf keeps its parent: runs of scraps that were let go below it are found through it.
        if isinstance(leaf.parent, Root):
            self.prune_root(leaf.parent.namespace)

    def prune_root(self, namespace: str) -> None:
        """Forget a namespace that holds nothing and that no lease uses."""
        root = self.roots.get(namespace)
        if root is not None and not root.children and not root.pins:
            del self.roots[namespace]

    def unpinned_leaves(self) -> Iterator[Node]:
        """Leaves that no running sequence needs, least recently used first. The caller removes each.

        A parent comes after its children in `recency`, so it is a leaf by the time that it is reached.
        """
        num_pinned = 0
        while num_pinned < len(self.recency):
            node = next(iter(self.recency))
            if node.pins:
                # It is in use, so it counts as just used; left there, each eviction would pass over it again.
                self.touch(node)
                num_pinned += 1
            else:
                yield node

    def leaves(self, root: Node) -> Iterator[Node]:
        """The nodes below `root` that have no children."""
        stack = list(root.children.values())
        while stack:
            node = stack.pop()
            if not node.children:
                yield node
            stack.extend(node.children.values())
