"""Puts an engine together: loads the model, sizes the pools, joins cache, scheduler and runner."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from forkpoint.cache import CacheGeometry, PrefixCache
from forkpoint.configs.errors import ConfigError
from forkpoint.configs.serving import EngineConfig
from forkpoint.configs.staircase import Staircase
from forkpoint.model.config import ModelConfig, load_config
from forkpoint.model.device import num_compute_threads, resolve_device, resolve_kv_dtype
from forkpoint.model.inputs import Kind
from forkpoint.model.load import Model, load_model
from forkpoint.model.runner import ModelRunner
from forkpoint.scheduler.constraint import Compilations
from forkpoint.scheduler.engine import Engine, Runner
from forkpoint.scheduler.limits import SchedulerLimits
from forkpoint.scheduler.memory import available_bytes, check_kv_memory, kv_memory_bytes
from forkpoint.scheduler.messages import EngineInfo, LoadProgress
from forkpoint.scheduler.pool_sizes import PoolDemand, PoolSizes, size_pools
from forkpoint.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from forkpoint.scheduler.grammar import GrammarCompiler

Progress = Callable[[LoadProgress], None]

# Defaults by device: a CPU step of more rows would stall running streams for most of a second.
DEFAULT_CHUNK = {"cpu": 512, "cuda": 8192}
DEFAULT_MAX_RUNNING = {"cpu": 32, "cuda": 256}


def build_engine(config: EngineConfig, progress: Progress) -> Engine:
    """Load and connect everything. Raises ModelLoadError or ConfigError for what the user can put right."""
    # Before the weights, which may take minutes; what is left after them is compared again.
    check_kv_memory(config, available_bytes(resolve_device(config.device)))
    progress(LoadProgress("reading the configuration", 0, 1))
    load_config(config.model_dir)  # again with the weights: what is wrong in it should be said first
    progress(LoadProgress("reading the configuration", 1, 1))
    model = load_model(
        config.model_dir,
        dtype=config.dtype,
        device=config.device,
        load_format=config.load_format,
        quantization=config.quantization,
        progress=lambda done, total: progress(LoadProgress("loading weights", done, total)),
    )
    limits = _limits(config, model)
    # Some ropes depend on how long a sequence may get here (LongRopeScaling).
    model = replace(model, config=replace(model.config, context_length=limits.context_length))
    progress(LoadProgress("warming up", 0, 1))
    kinds = model.config.kinds
    capacity: dict[Kind, int] = {"full": limits.full_pages, "swa": limits.swa_pages}
    runner = ModelRunner(
        model,
        num_pages={kind: capacity[kind] + 1 for kind in kinds},
        page_size=config.page_size,
        kv_cache_dtype=config.kv_cache_dtype,
        attention_backend=config.attention_backend,
    )
    runner.warm_up()
    progress(LoadProgress("warming up", 1, 1))
    compilations = _compilations(config.model_dir, model.config)
    return make_engine(config, limits, runner, _info(config, limits, model, runner), compilations)


def _compilations(model_dir: Path, config: ModelConfig) -> Compilations | None:
    """None where there is no tokenizer. A vocabulary takes seconds to load, so this only says how."""
    if not (model_dir / "tokenizer.json").is_file():
        return None

    def load() -> GrammarCompiler:
        from forkpoint.scheduler.grammar import GrammarCompiler

        return GrammarCompiler.load(model_dir, config.vocab_size, config.eos_token_ids)

    return Compilations(load)


class TiledRunner(Runner, Protocol):
    """A runner that says how its attention is tiled, and for which model."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def tile_rows(self) -> int: ...


def make_engine(
    config: EngineConfig,
    limits: SchedulerLimits,
    runner: TiledRunner,
    info: EngineInfo,
    compilations: Compilations | None = None,
) -> Engine:
    """Cache and scheduler around a runner. compilations: None refuses requests with a grammar."""
    grid = math.lcm(runner.tile_rows, config.page_size)
    if grid <= limits.max_rows:
        limits = replace(limits, chunk_grid=grid)
    cache = PrefixCache(
        limits.geometry,
        full_pages=limits.full_pages,
        swa_pages=limits.swa_pages,
        retention=config.retention,
        eviction=config.radix_eviction_policy,
        enabled=config.enable_radix_cache,
        staircase=_staircase(config, runner),
    )
    scheduler = Scheduler(cache, limits, compilations=compilations)
    return Engine(scheduler, runner, kinds=runner.config.kinds, info=info)


def _staircase(config: EngineConfig, runner: TiledRunner) -> Staircase | None:
    window = runner.config.window
    if window is None or not config.enable_rebuild:
        return None
    return Staircase(
        runner.config.layer_pattern, window, config.page_size, runner.tile_rows, depth=config.rebuild_depth
    )


def _limits(config: EngineConfig, model: Model) -> SchedulerLimits:
    device = model.device.type
    chunk = config.chunked_prefill_size or DEFAULT_CHUNK[device]
    max_running = config.max_running_requests or DEFAULT_MAX_RUNNING[device]
    context_length = _context_length(config, model.config)
    geometry = CacheGeometry(config.page_size, model.config.window)
    sizes = _pool_sizes(
        config, model, geometry, chunk=chunk, max_running=max_running, context_length=context_length
    )
    return SchedulerLimits(
        geometry,
        context_length=context_length,
        # Every running sequence must be able to decode in one step.
        max_rows=max(chunk, max_running),
        max_running=max_running,
        full_pages=sizes.full_pages,
        swa_pages=sizes.swa_pages,
    )


def _context_length(config: EngineConfig, model: ModelConfig) -> int:
    if config.context_length is None:
        return model.context_length
    if config.context_length > model.context_length:
        raise ConfigError(
            f"context length {config.context_length} is beyond the model's {model.context_length}",
            hint=f"lower --context-length to {model.context_length} or less, or leave it out",
        )
    return config.context_length


def _pool_sizes(
    config: EngineConfig,
    model: Model,
    geometry: CacheGeometry,
    *,
    chunk: int,
    max_running: int,
    context_length: int,
) -> PoolSizes:
    check_kv_memory(config, available_bytes(model.device))
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, model.dtype)
    return size_pools(
        PoolDemand(
            geometry,
            context_length=context_length,
            max_running=max_running,
            chunk=chunk,
            full_bytes_per_token=model.config.kv_bytes_per_token("full", kv_dtype),
            swa_bytes_per_token=model.config.kv_bytes_per_token("swa", kv_dtype),
            memory_bytes=kv_memory_bytes(config, model.device),
            available_bytes=available_bytes(model.device),
            full_tokens=config.full_tokens,
            swa_tokens=config.swa_tokens,
            swa_full_tokens_ratio=config.swa_full_tokens_ratio,
        )
    )


def _info(config: EngineConfig, limits: SchedulerLimits, model: Model, runner: ModelRunner) -> EngineInfo:
    size = limits.geometry.page_size
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, model.dtype)
    return EngineInfo(
        context_length=limits.context_length,
        vocab_size=model.config.vocab_size,
        page_size=size,
        full_tokens=limits.full_pages * size,
        swa_tokens=limits.swa_pages * size,
        window=limits.geometry.window,
        margin=limits.geometry.margin,
        max_running_requests=limits.max_running,
        chunked_prefill_size=limits.max_rows,
        dtype=str(model.dtype).removeprefix("torch."),
        device=model.device.type,
        attention_backend=runner.attention_backend,
        layer_pattern=model.config.layer_pattern,
        num_parameters=model.num_parameters,
        num_threads=num_compute_threads(model.device),
        family=model.config.family,
        weight_bytes=model.weight_bytes,
        quantization=model.quantization,
        kv_cache_dtype=str(kv_dtype).removeprefix("torch."),
        full_bytes_per_token=model.config.kv_bytes_per_token("full", kv_dtype),
        swa_bytes_per_token=model.config.kv_bytes_per_token("swa", kv_dtype),
    )
