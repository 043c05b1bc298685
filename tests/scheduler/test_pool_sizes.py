"""Pool sizes follow the flags where they speak, and memory where they do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forkpoint.cache import CacheGeometry
from forkpoint.configs.errors import ConfigError
from forkpoint.scheduler.limits import SchedulerLimits
from forkpoint.scheduler.pool_sizes import PoolDemand, size_pools

DEMAND = PoolDemand(
    CacheGeometry(16, 512),
    context_length=32768,
    max_running=32,
    chunk=512,
    full_bytes_per_token=3072,
    swa_bytes_per_token=15360,
    memory_bytes=2 << 30,
)


def test_both_pools_fit_the_memory() -> None:
    sizes = size_pools(DEMAND)
    assert 16 * (sizes.full_pages * 3072 + sizes.swa_pages * 15360) <= DEMAND.memory_bytes
    assert sizes.swa_pages * 16 > 32 * 512, "every running request has its window"


def test_flags_win_over_memory() -> None:
    sizes = size_pools(replace(DEMAND, full_tokens=4000, swa_tokens=2000))
    assert (sizes.full_pages, sizes.swa_pages) == (250, 125)
    assert size_pools(replace(DEMAND, full_tokens=4000, swa_full_tokens_ratio=0.5)).swa_pages == 125
    by_ratio = size_pools(replace(DEMAND, swa_full_tokens_ratio=0.1, context_length=1 << 30))
    assert by_ratio.swa_pages == pytest.approx(0.1 * by_ratio.full_pages, rel=0.01)


def test_a_model_of_one_kind_gets_one_pool() -> None:
    only_full = size_pools(replace(DEMAND, geometry=CacheGeometry(16, None), swa_bytes_per_token=0))
    assert only_full.swa_pages == 0


def test_too_little_memory_names_the_flag() -> None:
    with pytest.raises(ConfigError) as caught:
        size_pools(replace(DEMAND, memory_bytes=1000))
    assert "--kv-cache-memory-bytes" in str(caught.value.hint)


def test_a_swa_pool_below_one_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="window 512") as caught:
        SchedulerLimits(
            CacheGeometry(16, 512),
            context_length=100,
            max_rows=64,
            max_running=4,
            full_pages=100,
            swa_pages=30,
        )
    assert caught.value.hint == "--swa-total-tokens"
