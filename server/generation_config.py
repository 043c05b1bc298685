"""The sampling that a checkpoint recommends in generation_config.json, for requests that say nothing of it.

As vLLM and SGLang do by default. Only these five are taken; do_sample is ignored, as there, since many files
that recommend a temperature leave it out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from forkpoint.configs.errors import ModelLoadError
from forkpoint.configs.serving import SamplingDefaults
from forkpoint.server.generation_fields import MAX_REPETITION_PENALTY
from forkpoint.server.text import read_json

# Each as a request may set it.
_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**63 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
}


def read_sampling_defaults(model_dir: Path) -> SamplingDefaults:
    """What generation_config.json sets, the rest as OpenAI has it. Raises ModelLoadError for a bad value."""
    path = model_dir / "generation_config.json"
    recommended = read_json(path)
    found: dict[str, float] = {}
    for name, (low, high) in _RANGES.items():
        value = recommended.get(name)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not low <= value <= high or (name == "top_p" and value == 0):
            raise ModelLoadError(
                f"{path} sets {name} to {value!r}; it must be in [{low:g}, {high:g}]",
                hint="put it right, or use --generation-config none",
            )
        found[name] = float(value)
    top_k = max(int(found.pop("top_k", 0)), 0)
    return SamplingDefaults(**found, top_k=top_k)
