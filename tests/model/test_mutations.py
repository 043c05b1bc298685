"""A configuration that is read wrongly in one field gives other logits: none is set without being used."""

from __future__ import annotations

import pytest
from support.golden import (
    TOLERANCE,
    Checkpoints,
    float32_model,
    largest_error,
    poisoned_world,
    random_prompt,
    run_in_chunks,
)
from support.mutations import Mutation, mutated_model, mutations
from support.tiny_checkpoints import CONFIGS, reference_logits

from forkpoint.model.families import FAMILIES

# Right readings err by up to 4e-5; the least that a wrong one does here is .027.
SEEN = 0.01
# Others of the same family that have no field of their own.
_SAME = {"exaone4_full", "gemma3_multimodal", "mistral3", "mistral_full", "qwen3", "qwen3_all_sliding"}


def _cases() -> list[tuple[str, Mutation]]:
    cases = []
    for name in sorted(CONFIGS.keys() - _SAME):
        hf = CONFIGS[name]()
        family = FAMILIES[hf.model_type]
        cases += [(name, mutation) for mutation in mutations(family.read(hf.model_type, hf, (1,)))]
    return cases


@pytest.mark.parametrize(
    ("name", "mutation"), [pytest.param(*case, id=f"{case[0]}-{case[1].name}") for case in _cases()]
)
def test_wrong_reading_is_seen(checkpoints: Checkpoints, name: str, mutation: Mutation) -> None:
    model_dir = checkpoints[name]
    tokens = random_prompt(seed=1)
    wrong = mutated_model(float32_model(model_dir), model_dir, mutation)
    sequence = run_in_chunks(poisoned_world(wrong, page_size=16, backend="cpu"), tokens, len(tokens))
    assert largest_error(sequence, reference_logits(model_dir, tokens)) > SEEN


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "mimo_v2_flash", "phi3"])
def test_right_reading_passes_the_same_way(checkpoints: Checkpoints, name: str) -> None:
    model = float32_model(checkpoints[name])
    tokens = random_prompt(seed=1)
    same = mutated_model(model, checkpoints[name], Mutation("none", model.config))
    sequence = run_in_chunks(poisoned_world(same, page_size=16, backend="cpu"), tokens, len(tokens))
    assert largest_error(sequence, reference_logits(checkpoints[name], tokens)) < TOLERANCE
