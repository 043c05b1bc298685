"""Measures what a rebuild of given depth costs in accuracy and time on one model, against a cold run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forkpoint.model.load import Model
from forkpoint.scheduler.rebuild_probe import PAGE_SIZE, RebuildProbe, Run

# Greedy tokens to compare. Logits are compared at each of them, with the cold run's tokens before it.
NUM_NEW = 32


@dataclass(frozen=True, slots=True)
class DepthError:
    """One depth (None: exact) against the cold run of the same prompt.

    first_row: position at which layer 0 started. max_error, mean_error: of logits, over NUM_NEW positions.
    equal_tokens: greedy tokens equal until the first that is not. first_token_s: time to first token.
    """

    depth: int | None
    first_row: int
    max_error: float
    mean_error: float
    equal_tokens: int
    first_token_s: float


@dataclass(frozen=True, slots=True)
class RebuildMeasurement:
    """num_tokens: the full hit. num_new: greedy tokens compared. num_swa_layers: the depth that is exact.

    cold_s: time to first token of the cold run.
    """

    num_tokens: int
    num_new: int
    window: int
    num_swa_layers: int
    dtype: str
    device: str
    cold_s: float
    errors: tuple[DepthError, ...]


def measure_rebuild(
    model: Model,
    token_ids: Sequence[int],
    depths: Sequence[int | None],
    *,
    num_tokens: int,
    notice: Callable[[str], None] = lambda _: None,
) -> RebuildMeasurement:
    """Compare each depth with a cold run at a full hit of num_tokens, rounded down to pages.

    token_ids: at least num_tokens and a page of real text. notice: told what is about to run.
    Raises ConfigError if the model has nothing to rebuild or the text is too long for it.
    """
    num_cached = num_tokens - num_tokens % PAGE_SIZE
    assert PAGE_SIZE <= num_cached <= len(token_ids) - PAGE_SIZE
    probe = RebuildProbe(model, token_ids[: num_cached + PAGE_SIZE], num_new=NUM_NEW)
    notice(f"cold prefill of {num_cached} tokens")
    cold = probe.cold()
    errors = []
    for depth in depths:
        notice("exact rebuild" if depth is None else f"rebuild of {depth} windows")
        errors.append(_compare(cold, probe.rebuilt(depth, forced=cold.tokens), depth))
    return RebuildMeasurement(
        num_tokens=num_cached,
        num_new=NUM_NEW,
        window=probe.window,
        num_swa_layers=model.config.layer_pattern.count("S"),
        dtype=str(model.dtype).removeprefix("torch."),
        device=model.device.type,
        cold_s=cold.first_token_s,
        errors=tuple(errors),
    )


def _compare(cold: Run, run: Run, depth: int | None) -> DepthError:
    difference = (run.logits - cold.logits).abs()
    return DepthError(
        depth=depth,
        first_row=run.cached,
        max_error=float(difference.max()),
        mean_error=float(difference.mean()),
        equal_tokens=equal_start(run.tokens, cold.tokens),
        first_token_s=run.first_token_s,
    )


def equal_start(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading items are equal."""
    count = 0
    for one, other in zip(first, second, strict=True):
        if one != other:
            break
        count += 1
    return count
