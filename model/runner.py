"""The model as the scheduler sees it: a ragged batch in, sampled tokens and their log-probabilities out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from forkpoint.model.attention.backends import make_backend
from forkpoint.model.config import ModelConfig
from forkpoint.model.decoder import Decoder
from forkpoint.model.device import resolve_kv_dtype
from forkpoint.model.inputs import Draws, ForwardInput, Kind, KindTable, ScoredRows
from forkpoint.model.kv import KvPools
from forkpoint.model.load import Model
from forkpoint.model.logprobs import token_logprobs
from forkpoint.model.outputs import StepOutput, TokenLogprobs
from forkpoint.model.sampler import sample

# Logits of rows that are only scored are made in blocks: 64 MiB are 64 rows of 262,144.
SCORED_LOGITS_BYTES = 64 * 1024 * 1024


class ModelRunner:
    """Owns the KV pools of a loaded model and runs steps on them. Not thread-safe."""

    def __init__(
        self,
        model: Model,
        *,
        num_pages: Mapping[Kind, int],
        page_size: int,
        kv_cache_dtype: str = "auto",
        attention_backend: str = "auto",
    ) -> None:
        """num_pages: per kind of the model, page 0 included. kv_cache_dtype, attention_backend: as the flags.

        Raises ConfigError if memory does not suffice or the backend cannot run here.
        """
        self._model = model
        self._pools = KvPools(
            model.config,
            num_pages=num_pages,
            page_size=page_size,
            dtype=resolve_kv_dtype(kv_cache_dtype, model.dtype),
            device=model.device,
        )
        self._backend = make_backend(attention_backend, model.config, self._pools, model.device)
        self._decoder = Decoder(model, self._pools, self._backend)

    @property
    def config(self) -> ModelConfig:
        return self._model.config

    @property
    def pools(self) -> KvPools:
        """The KV memory; the checking runner of the tests poisons freed pages through it."""
        return self._pools

    @property
    def attention_backend(self) -> str:
        """Name of the backend in use; never `auto`."""
        return self._backend.name

    @property
    def tile_rows(self) -> int:
        """Rows of one attention tile of the backend; see AttentionBackend.tile_rows."""
        return self._backend.tile_rows

    @torch.inference_mode()
    def logits(self, inputs: ForwardInput) -> torch.Tensor:
        """Run one step and write its KV. Returns the logits of inputs.sample_rows, [S, V] float32."""
        return self._decoder.head(self._decoder.run(inputs)[: len(inputs.sample_rows)])

    @torch.inference_mode()
    def step(self, inputs: ForwardInput, draws: Draws) -> StepOutput:
        """Run one step, choose a token for each sample row and score the scored ones.

        draws[i] says how for sample_rows[i].
        A row with logits that are not finite, or with nothing to choose from, is a fault of that row alone.
        """
        num_sampled = len(inputs.sample_rows)
        assert len(draws) == num_sampled, "one draw for each sample row"
        hidden = self._decoder.run(inputs)
        logits = self._decoder.head(hidden[:num_sampled])
        tokens, faults = sample(logits, draws)
        asking = [row for row in range(num_sampled) if draws[row].params.num_logprobs is not None]
        return StepOutput(
            tokens,
            faults,
            _logprobs_of(logits, tokens, draws, [row for row in asking if row not in faults]),
            self._score(hidden[num_sampled:], inputs.scored),
        )

    def _score(self, hidden: torch.Tensor, scored: ScoredRows | None) -> TokenLogprobs | None:
        if scored is None:
            return None
        block = max(1, SCORED_LOGITS_BYTES // (4 * self.config.vocab_size))
        parts = [
            token_logprobs(
                self._decoder.head(hidden[start : start + block]),
                scored.token_ids[start : start + block],
                scored.num_top,
            )
            for start in range(0, len(scored.rows), block)
        ]
        return TokenLogprobs.join(parts) if parts else TokenLogprobs.none(scored.num_top)

    def warm_up(self, num_rows: int = 64) -> None:
        """Run a prefill of num_rows and one decode row, so that the first request pays for no set-up.

        Writes and reads page 0 only.
        """
        page_size = self._pools.page_size
        for rows in (num_rows, 1):
            self.logits(_scratch_input(rows, page_size, self.config))


def _logprobs_of(
    logits: torch.Tensor, tokens: NDArray[np.int64], draws: Draws, rows: Sequence[int]
) -> dict[int, TokenLogprobs]:
    """Of the chosen tokens of `rows`, each with as many of the most likely ones as its draw asks for."""
    if not rows:
        return {}
    wanted = [draws[row].params.num_logprobs or 0 for row in rows]
    own = logits if len(rows) == len(logits) else logits[list(rows)]
    together = token_logprobs(own, tokens[list(rows)], max(wanted))
    return {row: together.part(i, i + 1, wanted[i]) for i, row in enumerate(rows)}


def _scratch_input(num_rows: int, page_size: int, config: ModelConfig) -> ForwardInput:
    positions = np.arange(num_rows, dtype=np.int32)
    num_pages = -(-num_rows // page_size)
    table = KindTable(
        kv_indptr=np.array([0, num_pages], dtype=np.int32),
        kv_pages=np.zeros(num_pages, dtype=np.int32),
        first_position=np.zeros(1, dtype=np.int32),
        lowest_key=np.zeros(1, dtype=np.int32),
        last_page_len=np.array([num_rows - (num_pages - 1) * page_size], dtype=np.int32),
        write_slots=(positions % page_size).astype(np.int64),
    )
    return ForwardInput(
        token_ids=np.zeros(num_rows, dtype=np.int32),
        positions=positions,
        q_indptr=np.array([0, num_rows], dtype=np.int32),
        full_hits=np.zeros(1, dtype=np.int32),
        tables={kind: table for kind in config.kinds},
        sample_rows=np.array([num_rows - 1], dtype=np.int64),
    )
