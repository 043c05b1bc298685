"""Reads the configuration of a checkpoint directory, by whichever family it is of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forkpoint.configs.errors import ModelLoadError
from forkpoint.model.config import ModelConfig
from forkpoint.model.families.table import FAMILIES
from forkpoint.model.scope import check_scope, read_raw_config


def read_config(model_dir: Path) -> ModelConfig:
    """Read the configuration of a checkpoint. Raises ModelLoadError."""
    raw = read_raw_config(model_dir)
    check_scope(raw, supported=FAMILIES)
    model_type = raw["model_type"]
    # Imported here: it takes seconds, and only the process that loads a model should pay.
    from transformers import AutoConfig

    try:
        hf_config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        return FAMILIES[model_type].read(model_type, hf_config, _eos_token_ids(hf_config, model_dir))
    except ModelLoadError:
        raise
    except Exception as exc:  # transformers raises its own zoo of validation errors
        raise ModelLoadError(f"{model_dir / 'config.json'} cannot be read: {exc}") from exc


def _eos_token_ids(hf_config: Any, model_dir: Path) -> tuple[int, ...]:
    """Ids of both files: some checkpoints name the end of a turn in generation_config.json only."""
    found: set[int] = set()
    # A multimodal config may name them outside of its text part, or only there.
    sources = [getattr(config, "eos_token_id", None) for config in (hf_config, hf_config.get_text_config())]
    generation_path = model_dir / "generation_config.json"
    if generation_path.is_file():
        sources.append(json.loads(generation_path.read_text(encoding="utf-8")).get("eos_token_id"))
    for source in sources:
        if source is not None:
            found.update([source] if isinstance(source, int) else source)
    return tuple(sorted(found))
