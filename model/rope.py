"""Rotary position embedding: frequencies of a RopeSpec, and their application to heads."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from forkpoint.model.config import LinearScaling, Llama3Scaling, RopeSpec


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos and sin of a step's positions, [T, 1, rotary_dim] each; sin's first half carries the minus."""

    cos: torch.Tensor
    sin: torch.Tensor


def inverse_frequencies(spec: RopeSpec) -> torch.Tensor:
    """[rotary_dim / 2] float32: radians per position. Source: transformers 5.24, modeling_rope_utils.py."""
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
    frequencies = 1.0 / (spec.theta**exponents)
    if isinstance(spec.scaling, LinearScaling):
        return frequencies / spec.scaling.factor
    if isinstance(spec.scaling, Llama3Scaling):
        return _llama3_frequencies(frequencies, spec.scaling)
    return frequencies


def rotation(frequencies: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
    """cos and sin for positions [T], computed in float32 and rounded to `dtype` as transformers does."""
    angles = positions.to(torch.float32)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return Rotation(
        torch.cat((cos, cos), dim=-1)[:, None].to(dtype), torch.cat((-sin, sin), dim=-1)[:, None].to(dtype)
    )


def rotate(heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate heads [T, H, D]; dims from rotary_dim on pass through."""
    rotary_dim = rotation.cos.shape[-1]
    if rotary_dim < heads.shape[-1]:
        rotated = rotate(heads[..., :rotary_dim], rotation)
        return torch.cat((rotated, heads[..., rotary_dim:]), dim=-1)
    # Rolling by half a head swaps the halves (x2, x1); the sign that rotate-half needs is in sin.
    swapped = torch.roll(heads, rotary_dim // 2, dims=-1)
    return torch.addcmul(heads * rotation.cos, swapped, rotation.sin)


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
