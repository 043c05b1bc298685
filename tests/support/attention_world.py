"""Random pools and a ragged batch over them, for tests of attention; NaN lies wherever no row may look."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from forkpoint.model.attention.base import AttentionBackend
from forkpoint.model.config import LayerSpec, ModelConfig
from forkpoint.model.inputs import ForwardInput, KindTable
from forkpoint.model.kv import KvPools

CPU = torch.device("cpu")
WINDOW = 7


def attention_config(
    *,
    num_q_heads: int,
    num_kv_heads: int,
    softcap: float | None = None,
    k_dim: int = 12,
    v_dim: int = 8,
    window: int = WINDOW,
) -> ModelConfig:
    """One full and one sliding layer."""
    full = LayerSpec(
        window=None,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        k_dim=k_dim,
        v_dim=v_dim,
        rope=None,
        attention_scale=0.31,
        mlp_dim=1,
        softcap=softcap,
    )
    return ModelConfig(
        family="test",
        vocab_size=1,
        hidden_size=1,
        layers=(full, replace(full, window=window)),
        norm="rms",
        norm_eps=1e-6,
        is_tied=True,
        context_length=1000,
        eos_token_ids=(),
        checkpoint_dtype="float32",
    )


@dataclass(frozen=True)
class AttentionWorld:
    """Random pools with NaN wherever no row may look, and a batch over them."""

    config: ModelConfig
    pools: KvPools
    inputs: ForwardInput
    q: torch.Tensor

    def attend(
        self, backend: AttentionBackend, layer: int, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        backend.plan(self.inputs, self.inputs.tables)
        return backend.attend(self.q, layer, sinks)


def attention_world(
    config: ModelConfig,
    spans: list[tuple[int, int]],
    *,
    page_size: int,
    num_kept_pages: int = 0,
    floors: list[int] | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> AttentionWorld:
    """spans: (start, number of rows) of each sequence. num_kept_pages: SWA pages below the needed.

    floors: for each sequence, the position below which its SWA slots hold nothing, as in a rebuild.
    """
    window = config.layers[1].window
    assert window is not None
    floors = floors or [0] * len(spans)
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    num_pages = 1 + sum(-(-(start + rows) // page_size) for start, rows in spans)
    pools = KvPools(
        config,
        num_pages={"full": num_pages, "swa": num_pages},
        page_size=page_size,
        dtype=dtype,
        device=CPU,
    )
    for layer in pools.layers:
        layer.keys.fill_(torch.nan)
        layer.values.fill_(torch.nan)
    tables = {}
    for layer_index, kind in enumerate(config.kinds):
        free = list(rng.permutation(np.arange(1, num_pages)))
        indptr, pages, first_positions, last_lens, lowest_keys = [0], [], [], [], []
        for (start, rows), floor in zip(spans, floors, strict=True):
            end = start + rows
            lowest = max(0, start - window + 1) if kind == "swa" else 0
            first_page = max(0, lowest // page_size - num_kept_pages)
            listed = [int(free.pop()) for _ in range(first_page, -(-end // page_size))]
            live_from = max(lowest, floor) if kind == "swa" else 0
            positions = np.arange(live_from, end)
            page_of = np.array(listed)[positions // page_size - first_page]
            slots = torch.from_numpy(page_of * page_size + positions % page_size)
            for tensor in (pools.slots(layer_index).keys, pools.slots(layer_index).values):
                tensor[slots] = torch.randn((len(slots), *tensor.shape[1:]), generator=generator).to(dtype)
            pages += listed
            indptr.append(len(pages))
            first_positions.append(first_page * page_size)
            # With kept pages all that is listed counts as live, though the slots hold NaN here.
            lowest_keys.append(max(first_page * page_size, floor) if kind == "swa" else 0)
            last_lens.append((end - 1) % page_size + 1)
        tables[kind] = KindTable(
            np.array(indptr, dtype=np.int32),
            np.array(pages, dtype=np.int32),
            np.array(first_positions, dtype=np.int32),
            np.array(last_lens, dtype=np.int32),
            np.array(lowest_keys, dtype=np.int32),
            np.zeros(sum(rows for _, rows in spans), dtype=np.int64),
        )
    row_positions = [position for start, rows in spans for position in range(start, start + rows)]
    inputs = ForwardInput(
        token_ids=np.zeros(len(row_positions), dtype=np.int32),
        positions=np.array(row_positions, dtype=np.int32),
        q_indptr=np.cumsum([0] + [rows for _, rows in spans], dtype=np.int32),
        full_hits=np.zeros(len(spans), dtype=np.int32),
        tables=tables,
        sample_rows=np.zeros(0, dtype=np.int64),
    )
    q = torch.randn(
        (len(row_positions), config.layers[0].num_q_heads, config.layers[0].k_dim), generator=generator
    )
    return AttentionWorld(config, pools, inputs, q.to(dtype))
