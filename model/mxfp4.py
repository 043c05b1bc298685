"""MXFP4: 32 numbers of 4 bits with one exponent, as the experts of gpt-oss are stored.

A number is e2m1: a sign, two bits of exponent, one of mantissa. A byte holds two, the first in its low
nibble. The exponent of a block is e8m0, a byte s that stands for 2^(s - 127); 255 means NaN.
Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.2 and 6.3.
"""

from __future__ import annotations

import torch

BLOCK_SIZE = 32
BYTES_PER_BLOCK = BLOCK_SIZE // 2
NAN_EXPONENT = 255
_EXPONENT_BIAS = 127
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = (*_POSITIVE, *(-value for value in _POSITIVE))


def decode_mxfp4(blocks: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """The numbers of `blocks`, exactly: [..., G * 32] float32.

    blocks: [..., G, 16] uint8. exponents: [..., G] uint8, none of them NAN_EXPONENT (raises ValueError).
    Beyond float32's largest number lies only 2^127 times 2 and more: it becomes infinite.
    """
    if bool((exponents == NAN_EXPONENT).any()):
        raise ValueError("the exponent of a block is NaN")
    values = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=blocks.device)
    # Both numbers of a byte in one look-up.
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=-1)
    numbers = pairs[blocks.to(torch.int32)].flatten(-2)
    # In two steps, each a normal float32: 2^-127 alone would be flushed to zero where denormals are.
    power = exponents.to(torch.int32) - _EXPONENT_BIAS
    half = power // 2
    numbers *= _power_of_two(half).unsqueeze(-1)
    numbers *= _power_of_two(power - half).unsqueeze(-1)
    return numbers.flatten(-2)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent as float32, built from its bits; exponent: int32 in [-126, 127]."""
    return ((exponent + 127) << 23).view(torch.float32)
