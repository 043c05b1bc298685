"""How many slots each pool gets: from the flags where they say so, else from memory. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from forkpoint.cache import CacheGeometry
from forkpoint.cache.pages import page_floor
from forkpoint.configs.errors import ConfigError
from forkpoint.scheduler.memory import gib

# Windows kept for later requests that the default SWA pool has room for, beside those of running requests.
KEPT_WINDOWS = 64
# What a page costs beside its KV: its id in the free list.
BOOKKEEPING_BYTES = 4
# The default SWA pool takes at most this share of the KV memory.
MAX_SWA_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class PoolDemand:
    """What sizing needs to know. bytes_per_token: of one slot, over all layers of the kind; 0: no such layer.

    chunk: rows of one step. memory_bytes: what both pools may take together. available_bytes: what there is.
    """

    geometry: CacheGeometry
    context_length: int
    max_running: int
    chunk: int
    full_bytes_per_token: int
    swa_bytes_per_token: int
    memory_bytes: int
    available_bytes: int
    full_tokens: int | None = None
    swa_tokens: int | None = None
    swa_full_tokens_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Usable pages per kind; page 0 comes on top. swa_pages is 0 for a model without SWA layers."""

    full_pages: int
    swa_pages: int


def size_pools(demand: PoolDemand) -> PoolSizes:
    """Both pools in pages.

    Raises ConfigError when memory does not hold even one request of two pages, or not what flags ask for.
    """
    swa_tokens = _swa_tokens(demand)
    full_tokens = demand.full_tokens
    if full_tokens is None:
        left = demand.memory_bytes - swa_tokens * demand.swa_bytes_per_token
        # A model without full layers keeps only page numbers of the full kind: the tree's size is their cap.
        full_tokens = left // demand.full_bytes_per_token if demand.full_bytes_per_token else 16 * swa_tokens
        # More than every running request at full length can never be leased; the rest would be cache only.
        full_tokens = min(full_tokens, _most_useful_full_tokens(demand))
    size = demand.geometry.page_size
    sizes = PoolSizes(page_floor(full_tokens, size) // size, page_floor(swa_tokens, size) // size)
    _check_full(demand, sizes, full_tokens)
    _check_available(demand, sizes)
    return sizes


def _check_full(demand: PoolDemand, sizes: PoolSizes, full_tokens: int) -> None:
    if sizes.full_pages >= 2:
        return
    swa_bytes = sizes.swa_pages * demand.geometry.page_size * demand.swa_bytes_per_token
    raise ConfigError(
        f"KV may take {demand.memory_bytes} bytes, the sliding-window pool takes {swa_bytes} of them: "
        f"{max(0, full_tokens)} slots are left for full attention, and two pages of "
        f"{demand.geometry.page_size} are needed",
        hint="raise --kv-cache-memory-bytes, or set --max-total-tokens and --swa-total-tokens",
    )


def _check_available(demand: PoolDemand, sizes: PoolSizes) -> None:
    size = demand.geometry.page_size
    full_bytes = sizes.full_pages * (size * demand.full_bytes_per_token + BOOKKEEPING_BYTES)
    swa_bytes = sizes.swa_pages * (size * demand.swa_bytes_per_token + BOOKKEEPING_BYTES)
    if full_bytes + swa_bytes <= demand.available_bytes:
        return
    given = {
        "--max-total-tokens": demand.full_tokens,
        "--swa-total-tokens": demand.swa_tokens,
        "--swa-full-tokens-ratio": demand.swa_full_tokens_ratio,
    }
    flags = [flag for flag, value in given.items() if value is not None] or ["--mem-fraction-static"]
    raise ConfigError(
        f"a full pool of {sizes.full_pages * size} tokens ({gib(full_bytes)}) and a sliding-window pool of "
        f"{sizes.swa_pages * size} ({gib(swa_bytes)}) are asked for; {gib(demand.available_bytes)} of memory "
        "are available",
        hint=f"lower {' or '.join(flags)}",
    )


def _most_useful_full_tokens(demand: PoolDemand) -> int:
    return 4 * demand.max_running * demand.context_length


def _swa_tokens(demand: PoolDemand) -> int:
    window = demand.geometry.window
    if window is None:
        return 0
    if demand.swa_tokens is not None:
        return demand.swa_tokens
    if demand.swa_full_tokens_ratio is not None:
        return _by_ratio(demand, demand.swa_full_tokens_ratio)
    per_window = demand.geometry.max_resting_swa_tokens()
    wanted = demand.chunk + per_window * (demand.max_running + KEPT_WINDOWS)
    affordable = int(demand.memory_bytes * MAX_SWA_SHARE) // max(1, demand.swa_bytes_per_token)
    return max(min(wanted, affordable), per_window + 2 * demand.geometry.page_size)


def _by_ratio(demand: PoolDemand, ratio: float) -> int:
    if demand.full_tokens is not None:
        return int(ratio * demand.full_tokens)
    bytes_per_full_token = demand.full_bytes_per_token + ratio * demand.swa_bytes_per_token
    return int(ratio * demand.memory_bytes / max(1.0, bytes_per_full_token))
