"""The prefix cache: which pages hold the attention state of which token prefix, per kind of state.

It knows page ids and token ids, never tensors or requests.
"""

from __future__ import annotations

from forkpoint.cache.audit import AuditError
from forkpoint.cache.geometry import CacheGeometry
from forkpoint.cache.lease import Lease
from forkpoint.cache.pages import OutOfPages, PagePool, page_ceil, page_floor
from forkpoint.cache.prefix_cache import CacheCounters, Commit, Match, PoolUse, PrefixCache

__all__ = [
    "AuditError",
    "CacheCounters",
    "CacheGeometry",
    "Commit",
    "Lease",
    "Match",
    "OutOfPages",
    "PagePool",
    "PoolUse",
    "PrefixCache",
    "page_ceil",
    "page_floor",
]
