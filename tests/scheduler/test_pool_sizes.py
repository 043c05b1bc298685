"""Pool sizes follow the flags where they speak, and memory where they do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from forkpoint.cache import CacheGeometry
from forkpoint.configs.errors import ConfigError
from forkpoint.configs.serving import EngineConfig
from forkpoint.scheduler.build import build_engine
from forkpoint.scheduler.limits import SchedulerLimits
from forkpoint.scheduler.memory import check_kv_memory
from forkpoint.scheduler.pool_sizes import PoolDemand, size_pools

DEMAND = PoolDemand(
    CacheGeometry(16, 512),
    context_length=32768,
    max_running=32,
    chunk=512,
    full_bytes_per_token=3072,
    swa_bytes_per_token=15360,
    memory_bytes=2 << 30,
    available_bytes=16 << 30,
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


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        ({"full_tokens": 10_000_000}, "lower --max-total-tokens"),
        ({"full_tokens": 4000, "swa_tokens": 2_000_000}, "--swa-total-tokens"),
        (
            {"full_tokens": 5_000_000, "swa_full_tokens_ratio": 1.0},
            "--max-total-tokens or --swa-full-tokens-ratio",
        ),
        ({"memory_bytes": 64 << 30, "max_running": 1000}, "--mem-fraction-static"),
        # A model without full layers: its pages hold nothing, but their ids take memory.
        ({"full_tokens": 10**12, "full_bytes_per_token": 0}, "lower --max-total-tokens"),
    ],
)
def test_pools_beyond_the_memory_name_the_flag(flags: dict[str, int], hint: str) -> None:
    demand = replace(DEMAND, **flags)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"16\.0 GiB of memory are available") as caught:
        size_pools(demand)
    assert hint in str(caught.value.hint)


def test_a_swa_pool_that_leaves_nothing_says_so() -> None:
    with pytest.raises(ConfigError, match="pool takes 30720000000 of them: 0 slots are left") as caught:
        size_pools(replace(DEMAND, swa_tokens=2_000_000))
    assert "--swa-total-tokens" in str(caught.value.hint)


def test_a_budget_beyond_the_memory_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    # There is no model: the refusal comes first.
    config = EngineConfig(tmp_path / "none", device="cpu", kv_cache_memory_bytes=10**15)
    with pytest.raises(ConfigError, match=r"--kv-cache-memory-bytes is 1000000000000000 \(931,322\.6 GiB\)"):
        build_engine(config, lambda _: None)


def test_a_budget_within_the_memory_is_taken() -> None:
    check_kv_memory(EngineConfig(Path(), kv_cache_memory_bytes=1000), 1000)
    check_kv_memory(EngineConfig(Path()), 0)
    with pytest.raises(ConfigError):
        check_kv_memory(EngineConfig(Path(), kv_cache_memory_bytes=1001), 1000)


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
    assert caught.value.hint == "give more with --swa-total-tokens, or a smaller --page-size"
