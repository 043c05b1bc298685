"""An engine of the demo model in this process, driven step by step and timed: no HTTP, no text."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

import numpy as np

from forkpoint.configs.sampling import SamplingParams
from forkpoint.configs.serving import EngineConfig
from forkpoint.model.device import set_num_threads
from forkpoint.model.resolve import default_cache_dir, resolve_model
from forkpoint.scheduler.build import build_engine
from forkpoint.scheduler.messages import Abort, Submit


class EngineBench:
    """Mutable: prompts never repeat by accident, so that only what is meant to hits the cache."""

    def __init__(self, flags: Mapping[str, int | str], *, num_threads: int | None = None) -> None:
        """flags: fields of EngineConfig. num_threads: of the engine; None: as the server chooses."""
        set_num_threads(num_threads)
        model_dir = resolve_model("demo", cache_dir=default_cache_dir(dict(os.environ)), notice=print)
        config = EngineConfig(model_dir, device="cpu", context_length=8192, **flags)  # type: ignore[arg-type]
        self._engine = build_engine(config, lambda _: None)
        self._random = np.random.default_rng(0)
        self._num_submitted = 0

    def prompt(self, num_tokens: int) -> list[int]:
        """Random ordinary tokens, others at each call."""
        return [int(token) for token in self._random.integers(1_000, 200_000, num_tokens)]

    def time_to_first_token(self, prompt: Sequence[int]) -> float:
        """Seconds from submission until the prompt's only token is sampled."""
        began = time.perf_counter()
        self._submit(prompt, max_tokens=1)
        self._run_out()
        return time.perf_counter() - began

    def decode_steps(self, prompts: Sequence[Sequence[int]], num_steps: int) -> list[float]:
        """Seconds of each of `num_steps` steps in which all prompts decode."""
        uids = [self._submit(prompt, max_tokens=num_steps + 64) for prompt in prompts]
        while self._engine.scheduler.num_waiting or not self._all_decode():
            self._engine.step()
        self._engine.step()
        seconds = [self._timed_step() for _ in range(num_steps)]
        for uid in uids:
            self._engine.handle(Abort(uid))
        self._run_out()
        return seconds

    def steps_beside_prefill(self, stream: Sequence[int], prompt: Sequence[int]) -> list[float]:
        """Seconds of each step in which one request decodes while `prompt` is prefilled."""
        stream_uid = self._submit(stream, max_tokens=256)
        while not self._all_decode():
            self._engine.step()
        prompt_uid = self._submit(prompt, max_tokens=2)
        seconds = [self._timed_step()]
        while not self._all_decode():
            seconds.append(self._timed_step())
        for uid in (stream_uid, prompt_uid):
            self._engine.handle(Abort(uid))
        self._run_out()
        return seconds

    def _submit(self, prompt: Sequence[int], *, max_tokens: int) -> int:
        self._num_submitted += 1
        params = SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0)
        self._engine.handle(Submit(self._num_submitted, np.array(prompt, dtype=np.int32), params))
        return self._num_submitted

    def _all_decode(self) -> bool:
        running = self._engine.scheduler.running
        return bool(running) and all(sequence.is_decoding for sequence in running)

    def _timed_step(self) -> float:
        began = time.perf_counter()
        self._engine.step()
        return time.perf_counter() - began

    def _run_out(self) -> None:
        while self._engine.has_work:
            self._engine.step()
