"""Every family's logits equal those of transformers: in chunks, in mixed batches, with reuse and gap rows."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.golden import (
    PROMPT_LENGTH,
    TOLERANCE,
    Checkpoints,
    float32_model,
    largest_error,
    poisoned_world,
    random_prompt,
    run_in_chunks,
)
from support.tiny_checkpoints import CONFIGS, WINDOW, reference_logits, save_random_checkpoint
from support.tiny_configs import phi3_longrope_config
from transformers import AutoConfig

import forkpoint.model
from forkpoint.configs.errors import ModelLoadError
from forkpoint.model.config import load_config
from forkpoint.model.families import FAMILIES
from forkpoint.model.load import load_model

HYBRIDS = (
    "cohere2", "cwm", "exaone4", "gemma2", "gpt_oss", "granite_swa", "granitemoe_swa", "mellum",
    "mimo_v2_flash", "ministral", "olmo3", "qwen2", "smollm3", "vaultgemma",
)  # fmt: skip
ALL_SLIDING = ("mistral", "mixtral", "phi3", "qwen3_all_sliding")
# Frequencies that depend on the length of the prompt in transformers, and on that of the context here.
_LONGROPE = "phi3_longrope"


def test_every_family_has_a_tiny_checkpoint(checkpoints: Checkpoints) -> None:
    assert {load_config(path).family for path in checkpoints.values()} == FAMILIES.keys()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("backend", "page_size", "chunk"), [("torch", 4, PROMPT_LENGTH), ("cpu", 16, 32), ("cpu", 1, 7)]
)
def test_prefill_in_chunks_equals_transformers(
    checkpoints: Checkpoints, name: str, backend: str, page_size: int, chunk: int
) -> None:
    tokens = random_prompt(seed=1)
    world = poisoned_world(float32_model(checkpoints[name]), page_size=page_size, backend=backend)
    sequence = run_in_chunks(world, tokens, chunk)
    assert largest_error(sequence, reference_logits(checkpoints[name], tokens)) < TOLERANCE


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - {_LONGROPE}))
def test_mixed_batches_equal_transformers(checkpoints: Checkpoints, name: str) -> None:
    """Chunks and decode rows of any length side by side."""
    rng = np.random.default_rng(3)
    world = poisoned_world(float32_model(checkpoints[name]), page_size=4, backend="cpu")
    sequences = [
        world.sequence(random_prompt(seed=seed, length=length)) for seed, length in enumerate((70, 9, 1))
    ]
    while pending := [s for s in sequences if s.num_computed < len(s.token_ids)]:
        batch = []
        for sequence in pending:
            left = len(sequence.token_ids) - sequence.num_computed
            batch.append((sequence, min(left, int(rng.choice([1, 1, 2, 9, 17])))))
        world.step(batch)
        for sequence in pending:
            world.drop_out_of_window(sequence)
    for sequence in sequences:
        reference = reference_logits(checkpoints[name], sequence.token_ids)
        assert largest_error(sequence, reference) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "start"),
    # Full KV that reaches further than the windows needs full layers.
    [(name, 64) for name in HYBRIDS + ALL_SLIDING] + [(name, 32) for name in HYBRIDS],
)
def test_reused_prefix_equals_transformers(checkpoints: Checkpoints, name: str, start: int) -> None:
    """Rows in [start, full_hit) read another sequence's full KV and write none; SWA is live up to start."""
    full_hit = 64
    shared = random_prompt(seed=1)[:full_hit]
    first_tokens = shared + random_prompt(seed=2)[:20]
    second_tokens = shared + random_prompt(seed=3)[:30]
    world = poisoned_world(float32_model(checkpoints[name]), page_size=4, backend="cpu")
    first = world.sequence(first_tokens)
    world.step([(first, full_hit)])
    second = world.fork(first, second_tokens, start=start, full_hit=full_hit)
    world.step([(first, len(first_tokens) - full_hit)])
    while second.num_computed < len(second_tokens):
        world.step([(second, min(13, len(second_tokens) - second.num_computed))])
        world.drop_out_of_window(second, shared_with=[first])
    reference = reference_logits(checkpoints[name], second_tokens)
    assert largest_error(second, reference, start=start) < TOLERANCE


def test_short_context_takes_the_short_factors_of_longrope(tmp_path: Path) -> None:
    config = phi3_longrope_config(context_length=64)
    # transformers would take the ratio of both lengths, which is 1 here.
    config.rope_parameters["attention_factor"] = 1.2
    model_dir = save_random_checkpoint(config, tmp_path)
    tokens = random_prompt(seed=1, length=64)
    world = poisoned_world(float32_model(model_dir), page_size=4, backend="cpu")
    sequence = run_in_chunks(world, tokens, 13)
    assert largest_error(sequence, reference_logits(model_dir, tokens)) < TOLERANCE


def test_served_context_length_chooses_the_factors_of_longrope(checkpoints: Checkpoints) -> None:
    """A server that never goes beyond the original context computes as transformers does there."""
    model = float32_model(checkpoints[_LONGROPE])
    tokens = random_prompt(seed=1, length=64)
    reference = reference_logits(checkpoints[_LONGROPE], tokens)
    errors = {}
    for context_length in (64, 65):
        served = replace(model, config=replace(model.config, context_length=context_length))
        sequence = run_in_chunks(poisoned_world(served, page_size=4, backend="cpu"), tokens, 64)
        errors[context_length] = largest_error(sequence, reference)
    assert errors[64] < TOLERANCE < 0.01 < errors[65]


def test_routers_sinks_and_corrections_stay_float32(checkpoints: Checkpoints) -> None:
    from forkpoint.model.weights import is_float32, tensor_shapes

    model = load_model(checkpoints["mimo_v2_flash"], dtype="bfloat16", device="cpu")
    names = {name.rpartition(".")[2] for name in tensor_shapes(model.config) if is_float32(name)}
    assert names == {"router", "router_correction", "sinks"}
    assert {w.sinks.dtype for w in model.weights.layers if w.sinks is not None} == {torch.float32}


@pytest.mark.parametrize("name", ["gemma3_multimodal", "mistral3"])
def test_text_part_of_a_multimodal_model_has_the_settings_of_its_own(
    checkpoints: Checkpoints, name: str
) -> None:
    text = AutoConfig.from_pretrained(checkpoints[name]).text_config
    config = load_config(checkpoints[name])
    assert (config.num_layers, config.vocab_size) == (text.num_hidden_layers, text.vocab_size)
    assert config.is_tied == (name == "gemma3_multimodal")


def test_other_text_part_of_a_multimodal_model_is_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(checkpoints["mistral3"])
    config.text_config = AutoConfig.for_model("ministral3")
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="text part of this mistral3 is a 'ministral3'"):
        load_config(tmp_path)


def test_experts_that_all_rows_share_are_refused(tmp_path: Path) -> None:
    config = CONFIGS["granitemoe_swa"]()
    config.shared_intermediate_size = 64
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="shared_intermediate_size is 64"):
        load_config(tmp_path)


def test_mistral_with_types_that_transformers_ignores_is_refused(tmp_path: Path) -> None:
    config = CONFIGS["mistral"]()
    config.layer_types = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="same attention in all layers"):
        load_config(tmp_path)


def test_window_of_mimo_counts_the_query(checkpoints: Checkpoints) -> None:
    """The hub's number leaves it out; CONFIGS spells it that way."""
    assert load_config(checkpoints["mimo_v2_flash"]).window == WINDOW


def test_only_the_tables_know_a_model_by_name() -> None:
    """GGUF conversion and the texts of refusals have tables of their own."""
    tables = re.compile(r"families|gguf\w*\.py|scope\.py|demo_chat\.py|resolve\.py")
    root = Path(next(iter(forkpoint.model.__path__)))
    quoted = re.compile("|".join(rf"[\"']{re.escape(name)}[\"']" for name in FAMILIES))
    found = {
        str(path.relative_to(root)): quoted.findall(path.read_text(encoding="utf-8"))
        for path in root.rglob("*.py")
        if not tables.fullmatch(path.relative_to(root).parts[0])
    }
    assert {path: names for path, names in found.items() if names} == {}
