"""A real tiny model under the real scheduler and cache, with windows that can be taken away and poisoned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from support.tiny_checkpoints import gemma3_config, save_random_checkpoint

from forkpoint.cache import CacheGeometry
from forkpoint.configs.sampling import SamplingParams
from forkpoint.configs.serving import EngineConfig
from forkpoint.model.attention.base import slots_between
from forkpoint.model.inputs import Draws, ForwardInput
from forkpoint.model.load import Model
from forkpoint.model.outputs import StepOutput
from forkpoint.model.runner import ModelRunner
from forkpoint.scheduler.build import make_engine
from forkpoint.scheduler.engine import Engine
from forkpoint.scheduler.limits import SchedulerLimits
from forkpoint.scheduler.messages import EngineInfo, Submit

KvOfLayer = dict[int, tuple[torch.Tensor, torch.Tensor]]


def save_pattern(directory: Path, pattern: str, window: int) -> Path:
    """A random Gemma-3-like checkpoint with the given layer pattern and window."""
    config = gemma3_config()
    config.num_hidden_layers = len(pattern)
    config.layer_types = [{"S": "sliding_attention", "F": "full_attention"}[kind] for kind in pattern]
    config.sliding_window = window
    config.max_position_embeddings = 4096
    return save_random_checkpoint(config, directory)


class RecordingRunner:
    """Greedy; keeps the logits of every sampled row and, on request, the SWA KV below a position."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.config = runner.config
        self.logits: list[torch.Tensor] = []
        self.watched: tuple[int, int] | None = None
        self.swa_kv: KvOfLayer = {}
        self.failure: Exception | None = None

    @property
    def tile_rows(self) -> int:
        return self.runner.tile_rows

    def step(self, inputs: ForwardInput, draws: Draws) -> StepOutput:
        try:
            logits = self.runner.logits(inputs)
        except Exception as error:
            self.failure = error
            raise
        self._record_kv(inputs)
        self.logits.append(logits.clone())
        assert torch.isfinite(logits).all(), "NaN of a poisoned slot reached the logits"
        return StepOutput(logits.argmax(dim=-1).numpy())

    def _record_kv(self, inputs: ForwardInput) -> None:
        """The KV of watched positions, read at the first step of a single sequence that passes them."""
        if self.watched is None or self.swa_kv or inputs.num_sequences != 1:
            return
        start, end = self.watched
        if int(inputs.positions[-1]) < end:
            return
        slots = slots_between(inputs, "swa", 0, start, end, self.runner.pools.page_size)
        for index, spec in enumerate(self.config.layers):
            if spec.kind == "swa":
                pool = self.runner.pools.slots(index)
                self.swa_kv[index] = (pool.keys[slots].clone(), pool.values[slots].clone())


class RebuildWorld:
    """One engine on one tiny model; requests run one by one or together."""

    def __init__(
        self,
        model: Model,
        *,
        page_size: int,
        max_rows: int,
        backend: str = "cpu",
        enabled: bool = True,
        depth: int | None = None,
    ) -> None:
        pages = 4096 // page_size
        self.runner = RecordingRunner(
            ModelRunner(
                model,
                num_pages={"full": pages + 1, "swa": pages + 1},
                page_size=page_size,
                attention_backend=backend,
            )
        )
        config = EngineConfig(
            Path("unused"), page_size=page_size, enable_radix_cache=enabled, rebuild_depth=depth
        )
        geometry = CacheGeometry(page_size, model.config.window)
        limits = SchedulerLimits(
            geometry, context_length=4096, max_rows=max_rows, max_running=8, full_pages=pages, swa_pages=pages
        )
        self.engine: Engine = make_engine(config, limits, self.runner, _info(geometry))
        self.cache = self.engine.scheduler.cache
        self._next_uid = 0

    def submit(self, prompt: list[int], max_tokens: int) -> int:
        uid = self._next_uid
        self._next_uid += 1
        params = SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0)
        self.engine.handle(Submit(uid, np.array(prompt, dtype=np.int32), params))
        return uid

    def run(self) -> dict[int, list[int]]:
        """Run dry; the tokens of each uid."""
        tokens: dict[int, list[int]] = {}
        while self.engine.has_work:
            report = self.engine.step()
            if self.runner.failure is not None:
                raise self.runner.failure
            for uid, token in zip(report.uids, report.tokens, strict=True):
                tokens.setdefault(uid, []).append(token)
            self.cache.audit()
        return tokens

    def answer(self, prompt: list[int], max_tokens: int) -> tuple[list[int], torch.Tensor]:
        """Tokens and logits [max_tokens, V] of one request that runs alone."""
        self.runner.logits = []
        tokens = self.run_one(prompt, max_tokens)
        return tokens, torch.cat(self.runner.logits)

    def run_one(self, prompt: list[int], max_tokens: int) -> list[int]:
        uid = self.submit(prompt, max_tokens)
        return self.run()[uid]

    def drop_windows(self, *, keep_below: int | None = None) -> None:
        """Evict kept windows (all, or those that end above keep_below), and poison every free SWA slot."""
        swa = self.cache._swa
        assert swa is not None
        size = self.cache.geometry.page_size
        for window in list(swa.order.victims()):
            if keep_below is None or window.end_page * size > keep_below:
                swa.drop_window(window)
        # What nobody holds any more may stay live as scraps: these go, and no window more.
        swa.evict(swa.pool.num_free + swa.num_scrap_pages)
        self.poison_free_pages()

    def poison_free_pages(self) -> None:
        swa = self.cache._swa
        assert swa is not None
        free = torch.from_numpy(swa.pool.free_pages().astype(np.int64))
        for index, spec in enumerate(self.runner.config.layers):
            if spec.kind == "swa":
                self.runner.runner.pools.layers[index].keys[free] = torch.nan
                self.runner.runner.pools.layers[index].values[free] = torch.nan


def _info(geometry: CacheGeometry) -> EngineInfo:
    return EngineInfo(
        context_length=4096,
        vocab_size=256,
        page_size=geometry.page_size,
        full_tokens=4096,
        swa_tokens=4096,
        window=geometry.window,
        margin=geometry.margin,
        max_running_requests=8,
        chunked_prefill_size=64,
        dtype="float32",
        device="cpu",
        attention_backend="any",
        layer_pattern="",
        num_parameters=0,
    )
