"""The decoder by row kernels computes what it does in torch operations alone, for every family."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.golden import Checkpoints, random_prompt
from support.step_inputs import whole_prompt
from support.tiny_checkpoints import CONFIGS

from forkpoint.model.attention.torch_reference import TorchReferenceBackend
from forkpoint.model.decoder import Decoder
from forkpoint.model.kv import KvPools
from forkpoint.model.load import load_model

# Roundings that fall the other way grow through the layers; a wrong reading moves logits by .027 and more.
TOLERANCE = 1e-4
PAGE_SIZE = 16


def logits(model_dir: Path, tokens: list[int], *, is_native: bool) -> torch.Tensor:
    model = load_model(model_dir, dtype="float32", device="cpu")
    num_pages = 1 + -(-len(tokens) // PAGE_SIZE)
    pools = KvPools(
        model.config,
        num_pages=dict.fromkeys(model.config.kinds, num_pages),
        page_size=PAGE_SIZE,
        dtype=model.dtype,
        device=model.device,
    )
    backend = TorchReferenceBackend(model.config, pools, model.device)
    decoder = Decoder(model, pools, backend, is_native=is_native)
    with torch.inference_mode():
        return decoder.head(decoder.run(whole_prompt(tokens, model.config.kinds, PAGE_SIZE)))


@pytest.mark.parametrize("name", CONFIGS)
def test_decoder_by_kernels_equals_torch(checkpoints: Checkpoints, name: str) -> None:
    tokens = random_prompt(seed=1, length=40)
    native = logits(checkpoints[name], tokens, is_native=True)
    plain = logits(checkpoints[name], tokens, is_native=False)
    assert native.shape == plain.shape and len(native) == 2
    assert np.abs((native - plain).numpy()).max() < TOLERANCE
