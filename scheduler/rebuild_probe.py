"""A model under the real scheduler and cache, to measure rebuilds: a prompt runs cold or without windows."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from forkpoint.cache import CacheGeometry
from forkpoint.cache.pages import num_pages_for
from forkpoint.configs.errors import ConfigError
from forkpoint.configs.sampling import SamplingParams
from forkpoint.configs.serving import EngineConfig
from forkpoint.model.attention.base import slots_between
from forkpoint.model.config import ModelConfig
from forkpoint.model.inputs import Draws, ForwardInput
from forkpoint.model.load import Model
from forkpoint.model.outputs import StepOutput
from forkpoint.model.runner import ModelRunner
from forkpoint.scheduler.build import make_engine
from forkpoint.scheduler.limits import SchedulerLimits
from forkpoint.scheduler.messages import EngineInfo, Submit

PAGE_SIZE = 16
# A multiple of the attention tile of every backend, so that a rebuild is bit-equal where it can be.
CHUNK = 512


@dataclass(frozen=True, slots=True)
class Run:
    """One answer. logits: [n, V] float32 on the CPU, of the n sampled positions; tokens: their argmax.

    first_token_s: from submission to the first token; first_token_cpu_s: the processor time of that.
    cached, rebuilt: prompt tokens, as usage reports them.
    window: per SWA layer keys and values of the last W - 1 positions of the full hit, as first computed.
    """

    tokens: tuple[int, ...]
    logits: torch.Tensor
    first_token_s: float
    first_token_cpu_s: float
    cached: int
    rebuilt: int
    window: Mapping[int, tuple[torch.Tensor, torch.Tensor]]


class RebuildProbe:
    """Runs one prompt again and again: its first num_cached tokens are what a full hit covers.

    prompt: num_cached tokens, a multiple of PAGE_SIZE, and one page more.
    Raises ConfigError for a model without SWA layers, or whose context is too short.
    """

    def __init__(self, model: Model, prompt: Sequence[int], *, num_new: int) -> None:
        window = model.config.window
        if window is None:
            raise ConfigError(
                "the model has no sliding-window layers, so nothing is ever rebuilt",
                hint="measure another MODEL",
            )
        if len(prompt) + num_new > model.config.context_length:
            raise ConfigError(
                f"{len(prompt)} prompt tokens and {num_new} more are beyond the model's context of "
                f"{model.config.context_length}",
                hint="measure fewer by --tokens",
            )
        assert len(prompt) % PAGE_SIZE == 0
        self.num_cached = len(prompt) - PAGE_SIZE
        self._prompt = np.array(prompt, dtype=np.int32)
        self._num_new = num_new
        geometry = CacheGeometry(PAGE_SIZE, window)
        full_pages = num_pages_for(len(prompt) + num_new, PAGE_SIZE) + 2
        # A running window with its chunk, and the windows that are kept meanwhile.
        swa_pages = num_pages_for(4 * geometry.max_resting_swa_tokens() + 2 * CHUNK, PAGE_SIZE)
        runner = ModelRunner(
            model, num_pages={"full": full_pages + 1, "swa": swa_pages + 1}, page_size=PAGE_SIZE
        )
        self._recorder = _Recorder(runner, watched=(max(0, self.num_cached - (window - 1)), self.num_cached))
        limits = SchedulerLimits(
            geometry,
            context_length=model.config.context_length,
            max_rows=CHUNK,
            max_running=1,
            full_pages=full_pages,
            swa_pages=swa_pages,
        )
        config = EngineConfig(Path(), retention="branch", radix_eviction_policy="lru")
        self._engine = make_engine(config, limits, self._recorder, _info(limits, model, runner))
        self._next_uid = 0
        runner.warm_up()

    @property
    def window(self) -> int:
        window = self._recorder.config.window
        assert window is not None
        return window

    def cold(self) -> Run:
        """The answer with an empty cache; afterwards the cache holds the prompt."""
        assert self._engine.scheduler.cache.flush()
        return self._run(None)

    def rebuilt(self, depth: int | None, *, forced: Sequence[int] | None = None) -> Run:
        """The answer over the full hit, all windows gone; cold() comes first.

        depth: windows to rebuild; None: exactly. forced: tokens to go on with instead of the sampled ones, so
        that logits stay comparable where the answers part.
        """
        cache = self._engine.scheduler.cache
        assert cache.staircase is not None
        cache.staircase = replace(cache.staircase, depth=depth)
        cache.evict_windows()
        swa = cache.swa_use
        assert swa is not None and swa.free == swa.capacity
        self._recorder.poison()
        run = self._run(forced)
        assert run.cached + run.rebuilt == self.num_cached
        return run

    def _run(self, forced: Sequence[int] | None) -> Run:
        self._recorder.begin(forced)
        params = SamplingParams(seed=0, max_tokens=self._num_new, temperature=0.0)
        self._next_uid += 1
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        self._engine.handle(Submit(self._next_uid, self._prompt, params))
        first_token_s = first_token_cpu_s = 0.0
        cached = rebuilt = 0
        while self._engine.has_work:
            report = self._engine.step()
            if self._recorder.failure is not None:
                raise self._recorder.failure
            for started in report.started:
                cached, rebuilt = started.cached_tokens, started.rebuilt_tokens
            if len(report.tokens) and not first_token_s:
                first_token_s = time.perf_counter() - started_s
                first_token_cpu_s = time.process_time() - started_cpu_s
        logits = torch.cat(self._recorder.logits)
        tokens = tuple(int(token) for token in logits.argmax(dim=-1))
        return Run(tokens, logits, first_token_s, first_token_cpu_s, cached, rebuilt, self._recorder.window)


class _Recorder:
    """A runner that keeps the logits and the window of one run. Mutable: begin() starts the next one."""

    def __init__(self, runner: ModelRunner, *, watched: tuple[int, int]) -> None:
        self._runner = runner
        self._watched = watched
        self._forced: Sequence[int] | None = None
        self.logits: list[torch.Tensor] = []
        self.window: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.failure: Exception | None = None

    @property
    def config(self) -> ModelConfig:
        return self._runner.config

    @property
    def tile_rows(self) -> int:
        return self._runner.tile_rows

    def begin(self, forced: Sequence[int] | None) -> None:
        self._forced = forced
        self.logits, self.window = [], {}

    def poison(self) -> None:
        """Make a read of any SWA slot that was not written since show as NaN. All slots must be free."""
        for spec, kv in zip(self.config.layers, self._runner.pools.layers, strict=True):
            if spec.kind == "swa":
                kv.keys.fill_(torch.nan)
                kv.values.fill_(torch.nan)

    def step(self, inputs: ForwardInput, draws: Draws) -> StepOutput:
        try:
            logits = self._runner.logits(inputs)
            if not torch.isfinite(logits).all():
                raise FloatingPointError("logits are not finite: the rebuild read what it had not written")
        except Exception as error:
            self.failure = error  # the engine would only log it
            raise
        self._record_window(inputs)
        if len(inputs.sample_rows) == 0:
            return StepOutput(np.zeros(0, dtype=np.int64))
        position = len(self.logits)
        self.logits.append(logits.to("cpu", torch.float32, copy=True))
        token = int(logits.argmax()) if self._forced is None else self._forced[position]
        return StepOutput(np.array([token], dtype=np.int64))

    def _record_window(self, inputs: ForwardInput) -> None:
        start, end = self._watched
        if self.window or int(inputs.positions[-1]) < end:
            return
        slots = slots_between(inputs, "swa", 0, start, end, PAGE_SIZE)
        for index, spec in enumerate(self.config.layers):
            if spec.kind == "swa":
                pool = self._runner.pools.slots(index)
                self.window[index] = (pool.keys[slots].clone(), pool.values[slots].clone())


def _info(limits: SchedulerLimits, model: Model, runner: ModelRunner) -> EngineInfo:
    return EngineInfo(
        context_length=limits.context_length,
        vocab_size=model.config.vocab_size,
        page_size=PAGE_SIZE,
        full_tokens=limits.full_pages * PAGE_SIZE,
        swa_tokens=limits.swa_pages * PAGE_SIZE,
        window=limits.geometry.window,
        margin=limits.geometry.margin,
        max_running_requests=1,
        chunked_prefill_size=CHUNK,
        dtype=str(model.dtype).removeprefix("torch."),
        device=model.device.type,
        attention_backend=runner.attention_backend,
        layer_pattern=model.config.layer_pattern,
        num_parameters=model.num_parameters,
    )
