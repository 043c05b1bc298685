"""Pool sizes for replays: `ample` never evicts, `tight` holds the running requests and little more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from forkpoint.cache import page_ceil
from forkpoint.scheduler.traces import TraceRequest, Workload

Pools = Literal["ample", "tight"]


@dataclass(frozen=True, slots=True)
class PoolSlots:
    """Usable slots of each pool, in tokens; page 0 comes on top."""

    full: int
    swa: int


def ample_pools(requests: Sequence[TraceRequest], *, page_size: int, chunk: int) -> PoolSlots:
    """Both pools hold every request of the trace, and a chunk."""
    lengths = (len(request.prompt) + len(request.output) for request in requests)
    slots = sum(page_ceil(length, page_size) for length in lengths) + chunk + 4096
    slots = page_ceil(slots, page_size)
    return PoolSlots(slots, slots)


def tight_pools(
    workload: Workload, *, page_size: int, window: int, chunk: int, concurrency: int
) -> PoolSlots:
    """Full: the system prompts and a few questions. SWA: what runs, and about six windows."""
    per_running = 384
    full = workload.num_groups_used * workload.system_len + 16 * 320
    if workload.kind == "chat":
        per_running = 1024
        full = workload.system_len + workload.num_requests * 900
    full += chunk + concurrency * per_running
    swa = chunk + concurrency * (window + 128 + 2 * page_size + 64) + 6 * (window + page_size)
    return PoolSlots(page_ceil(full, page_size), page_ceil(swa, page_size))
