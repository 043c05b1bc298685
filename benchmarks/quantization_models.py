"""The demo models in several forms, run on the same text: what benchmarks/quantization.py compares."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from forkpoint.model.inputs import ForwardInput, KindTable
from forkpoint.model.load import Model, load_model
from forkpoint.model.runner import ModelRunner

PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Rounding:
    """Weights rounded to whole numbers of `bits`, one float32 scale for `group` inputs (None: for all).

    body_only: embedding and head stay as they are.
    """

    bits: int
    group: int | None
    body_only: bool = False


@dataclass(frozen=True, slots=True)
class Form:
    """How a model's weights are held. rounding: in torch, for measurements; nothing serves it."""

    name: str
    dtype: Literal["float32", "bfloat16"]
    quantization: Literal["none", "int8"] = "none"
    rounding: Rounding | None = None

    def load(self, model_dir: Path) -> Model:
        """The model in this form."""
        with _rounded(model_dir, self.rounding) as source:
            return load_model(source, dtype=self.dtype, device="cpu", quantization=self.quantization)


@contextlib.contextmanager
def _rounded(model_dir: Path, rounding: Rounding | None) -> Iterator[Path]:
    """A checkpoint with rounded matrices, as float32; the checkpoint itself without a rounding."""
    if rounding is None:
        yield model_dir
        return
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for path in model_dir.glob("*.json"):
            shutil.copy(path, directory)
        tensors: dict[str, torch.Tensor] = {}
        for path in model_dir.glob("*.safetensors"):
            tensors |= load_file(path)
        for key, tensor in tensors.items():
            is_table = "embed_tokens" in key or "lm_head" in key
            if tensor.ndim == 2 and not (is_table and rounding.body_only):
                tensors[key] = rounded(tensor, rounding)
        (directory / "model.safetensors.index.json").unlink(missing_ok=True)
        save_file(tensors, directory / "model.safetensors")
        yield directory


def rounded(weight: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """[out, in] after the rounding, float32: symmetric, the largest of a group on the last level."""
    levels = 2 ** (rounding.bits - 1) - 1
    num_in = weight.shape[1]
    group = rounding.group or num_in
    padded = torch.nn.functional.pad(weight.float(), (0, -num_in % group)).unflatten(1, (-1, group))
    scales = padded.abs().amax(dim=-1, keepdim=True).div(levels).clamp(min=torch.finfo(torch.float32).tiny)
    rounded: torch.Tensor = (padded / scales).round().mul(scales).flatten(1)[:, :num_in]
    return rounded.contiguous()


class Texts:
    """Sequences of a model, from nothing to `length` tokens, whose pages lie one after the other. Mutable."""

    def __init__(self, model: Model, *, num_sequences: int, length: int) -> None:
        self._pages = -(-length // PAGE_SIZE)
        self._num_computed = [0] * num_sequences
        num_pages = {kind: 1 + num_sequences * self._pages for kind in model.config.kinds}
        self._runner = ModelRunner(model, num_pages=num_pages, page_size=PAGE_SIZE)

    def logits(self, next_tokens: Mapping[int, Sequence[int]]) -> torch.Tensor:
        """Log-softmax after each of the next tokens of some sequences (by number), row after row.

        All in one step. One token for each sequence is a decode step.
        """
        spans = [
            (number, self._num_computed[number], self._num_computed[number] + len(tokens))
            for number, tokens in next_tokens.items()
        ]
        for number, _, end in spans:
            self._num_computed[number] = end
        table = self._table(spans)
        lengths = [end - start for _, start, end in spans]
        logits = self._runner.logits(
            ForwardInput(
                token_ids=np.concatenate([np.asarray(tokens, np.int32) for tokens in next_tokens.values()]),
                positions=np.concatenate([np.arange(start, end, dtype=np.int32) for _, start, end in spans]),
                q_indptr=np.cumsum([0, *lengths], dtype=np.int32),
                full_hits=np.zeros(len(spans), dtype=np.int32),
                tables={kind: table for kind in self._runner.config.kinds},
                sample_rows=np.arange(sum(lengths), dtype=np.int64),
            )
        )
        return torch.log_softmax(logits.float(), dim=-1)

    def _table(self, spans: Sequence[tuple[int, int, int]]) -> KindTable:
        pages, slots, indptr = [], [], [0]
        for number, start, end in spans:
            first = 1 + number * self._pages  # page 0 is nobody's
            pages.append(np.arange(first, first + -(-end // PAGE_SIZE), dtype=np.int32))
            slots.append(first * PAGE_SIZE + np.arange(start, end, dtype=np.int64))
            indptr.append(indptr[-1] + len(pages[-1]))
        return KindTable(
            kv_indptr=np.array(indptr, dtype=np.int32),
            kv_pages=np.concatenate(pages),
            first_position=np.zeros(len(spans), dtype=np.int32),
            lowest_key=np.zeros(len(spans), dtype=np.int32),
            last_page_len=np.array([(end - 1) % PAGE_SIZE + 1 for _, _, end in spans], dtype=np.int32),
            write_slots=np.concatenate(slots),
        )
