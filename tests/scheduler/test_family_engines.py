"""Engines as served, their pools sized from memory: tokens of transformers, also on a reused prefix."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.tiny_checkpoints import reference_logits, save_tiny_checkpoint

from forkpoint.configs.sampling import SamplingParams
from forkpoint.configs.serving import EngineConfig
from forkpoint.scheduler.build import build_engine
from forkpoint.scheduler.engine import Engine
from forkpoint.scheduler.messages import Submit


def run(engine: Engine, uid: int, prompt: list[int], num_tokens: int) -> list[int]:
    params = SamplingParams(seed=0, max_tokens=num_tokens, temperature=0.0)
    engine.handle(Submit(uid, np.array(prompt, dtype=np.int32), params))
    tokens: list[int] = []
    while engine.has_work:
        tokens += engine.step().tokens
    return tokens


# No full layers; KV that differs by kind; sinks, experts and a window shorter than a chunk.
@pytest.mark.parametrize("name", ["mistral", "mimo_v2_flash", "gpt_oss"])
def test_greedy_tokens_equal_transformers(tmp_path: Path, name: str) -> None:
    model_dir = save_tiny_checkpoint(name, tmp_path)
    config = EngineConfig(model_dir, device="cpu", dtype="float32", kv_cache_memory_bytes=8 * 2**20)
    engine = build_engine(config, lambda progress: None)
    shared = [int(token) for token in np.random.default_rng(0).integers(3, 250, 70)]
    for uid, question in enumerate([[7, 8, 9], [17, 18], [21]]):
        prompt = shared + question
        tokens = run(engine, uid, prompt, 6)
        for index, token in enumerate(tokens):
            assert token == int(reference_logits(model_dir, prompt + tokens[:index])[-1].argmax())
    stats = engine.stats()
    assert stats.cached_tokens + stats.rebuilt_tokens >= 2 * 64
