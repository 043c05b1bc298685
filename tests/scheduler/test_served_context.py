"""--context-length reaches the model: frequencies that differ for long contexts are as served."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support.tiny_checkpoints import reference_logits, save_tiny_checkpoint

from forkpoint.configs.sampling import SamplingParams
from forkpoint.configs.serving import EngineConfig
from forkpoint.scheduler.build import build_engine
from forkpoint.scheduler.messages import Submit

# The tiny model's original context.
SHORT = 64


def greedy(model_dir: Path, prompt: list[int], num_tokens: int, *, context_length: int | None) -> list[int]:
    config = EngineConfig(
        model_dir, device="cpu", dtype="float32", full_tokens=1024, context_length=context_length
    )
    engine = build_engine(config, lambda progress: None)
    params = SamplingParams(seed=0, max_tokens=num_tokens, temperature=0.0)
    engine.handle(Submit(1, np.array(prompt, dtype=np.int32), params))
    tokens: list[int] = []
    while engine.has_work:
        tokens += engine.step().tokens
    return tokens


def test_short_context_takes_the_short_factors(tmp_path: Path) -> None:
    model_dir = save_tiny_checkpoint("phi3_longrope", tmp_path)
    prompt = [int(token) for token in np.random.default_rng(0).integers(3, 250, 40)]
    expected: list[int] = []
    # transformers takes the short ones as long as a sequence is short.
    while len(expected) < 20:
        expected.append(int(reference_logits(model_dir, prompt + expected)[-1].argmax()))
    assert greedy(model_dir, prompt, 20, context_length=SHORT) == expected
    assert greedy(model_dir, prompt, 20, context_length=None) != expected
