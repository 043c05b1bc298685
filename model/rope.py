"""Rotary position embedding: frequencies of a RopeSpec, and their application to heads."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from forkpoint.model.config import LinearScaling, Llama3Scaling, LongRopeScaling, RopeSpec, YarnScaling

# Positions that a table holds at least, so that it seldom grows.
_FIRST_POSITIONS = 1024


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos and sin of a step's positions, [T, 1, rotary_dim] each; sin has the minus of a pair's first."""

    cos: torch.Tensor
    sin: torch.Tensor
    is_interleaved: bool


class RotaryTable:
    """cos and sin of every position up to the furthest so far; made once and grown, not made in each step.

    angles: [P, rotary_dim] float32: cos, then sin.
    """

    def __init__(self, spec: RopeSpec, context_length: int, dtype: torch.dtype, device: torch.device) -> None:
        """context_length: the longest sequence that is served. dtype: of the rows that are rotated."""
        self._spec = spec
        self._context_length = context_length
        self._dtype = torch.float32 if spec.is_wide else dtype
        self._frequencies = inverse_frequencies(spec, context_length).to(device)
        self.angles = _angles(spec, self._frequencies, 0, self._dtype)

    def reach(self, num_positions: int) -> None:
        """Hold at least the positions [0, num_positions); call it before they are rotated."""
        if num_positions > len(self.angles):
            length = min(max(2 * num_positions, _FIRST_POSITIONS), self._context_length)
            self.angles = _angles(self._spec, self._frequencies, max(length, num_positions), self._dtype)

    def rotation(self, positions: torch.Tensor) -> Rotation:
        """Of rows at positions [T] int64, in the dtype that the rotation computes in."""
        cos, sin = self.angles.index_select(0, positions).to(self._dtype).chunk(2, dim=-1)
        if self._spec.is_interleaved:
            cos, sin = cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(1)
        else:
            cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return Rotation(cos[:, None], sin[:, None], self._spec.is_interleaved)


def inverse_frequencies(spec: RopeSpec, context_length: int) -> torch.Tensor:
    """[rotary_dim / 2] float32: radians per position. Source: transformers 5.24, modeling_rope_utils.py.

    context_length: the longest sequence that is served; only LongRopeScaling asks for it.
    """
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
    frequencies = 1.0 / (spec.theta**exponents)
    if isinstance(spec.scaling, LinearScaling):
        return frequencies / spec.scaling.factor
    if isinstance(spec.scaling, Llama3Scaling):
        return _llama3_frequencies(frequencies, spec.scaling)
    if isinstance(spec.scaling, YarnScaling):
        return _yarn_frequencies(frequencies, spec, spec.scaling)
    if isinstance(spec.scaling, LongRopeScaling):
        is_long = context_length > spec.scaling.original_context_length
        return frequencies / torch.tensor(
            spec.scaling.long_factors if is_long else spec.scaling.short_factors, dtype=torch.float32
        )
    return frequencies


def rotate(heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate heads [T, H, D]; dims from rotary_dim on pass through."""
    rotary_dim = rotation.cos.shape[-1]
    if rotary_dim < heads.shape[-1]:
        rotated = rotate(heads[..., :rotary_dim], rotation)
        return torch.cat((rotated, heads[..., rotary_dim:]), dim=-1)
    wide = heads.to(rotation.cos.dtype)
    if rotation.is_interleaved:
        swapped = wide.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        # Rolling by half a head swaps the halves (x2, x1); the sign that rotate-half needs is in sin.
        swapped = torch.roll(wide, rotary_dim // 2, dims=-1)
    return torch.addcmul(wide * rotation.cos, swapped, rotation.sin).to(heads.dtype)


def _angles(
    spec: RopeSpec, frequencies: torch.Tensor, num_positions: int, dtype: torch.dtype
) -> torch.Tensor:
    """[num_positions, rotary_dim] float32: cos, then sin, computed in float32 and rounded to `dtype`."""
    positions = torch.arange(num_positions, dtype=torch.float32, device=frequencies.device)
    angles = positions[:, None] * frequencies
    both = torch.cat((angles.cos(), angles.sin()), dim=-1)
    if isinstance(spec.scaling, YarnScaling | LongRopeScaling):
        both = both * spec.scaling.attention_factor
    return both.to(dtype).to(torch.float32)


def _llama3_frequencies(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    wavelengths = 2 * math.pi / frequencies
    low = scaling.original_context_length / scaling.low_freq_factor
    high = scaling.original_context_length / scaling.high_freq_factor
    smooth = (scaling.original_context_length / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    scaled = torch.where(wavelengths > low, frequencies / scaling.factor, between)
    return torch.where(wavelengths < high, frequencies, scaled)


def _yarn_frequencies(frequencies: torch.Tensor, spec: RopeSpec, scaling: YarnScaling) -> torch.Tensor:
    """Source: Peng et al. 2023, "YaRN", section 3.2."""

    def dim_that_turns(times: float) -> float:
        wavelength = scaling.original_context_length / (times * 2 * math.pi)
        return spec.rotary_dim * math.log(wavelength) / (2 * math.log(spec.theta))

    low, high = dim_that_turns(scaling.beta_fast), dim_that_turns(scaling.beta_slow)
    if scaling.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    width = high - low or 0.001  # no division by zero
    ramp = ((torch.arange(len(frequencies), dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp)
