"""MXFP4 numbers: every byte and every exponent mean what transformers and the specification say."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from forkpoint.model.mxfp4 import E2M1_VALUES, decode_mxfp4


def _every_byte(num_experts: int, num_out: int, num_blocks: int) -> torch.Tensor:
    """[E, out, G, 16] uint8: random bytes, all 256 of them among these."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (num_experts, num_out, num_blocks, 16), generator=generator)
    blocks.view(-1)[:256] = torch.arange(256)
    return blocks.to(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_transformers_for_every_byte_and_exponent(dtype: torch.dtype) -> None:
    blocks = _every_byte(3, 17, 5)
    exponents = torch.arange(3 * 17 * 5).view(3, 17, 5).to(torch.uint8)  # 0 to 254, each once
    assert exponents.max() == 254
    ours = decode_mxfp4(blocks, exponents)
    theirs = convert_moe_packed_tensors(blocks, exponents, dtype=dtype)  # [E, in, out]
    assert torch.equal(ours.transpose(1, 2).to(dtype), theirs)


def test_low_nibble_comes_first() -> None:
    block = torch.zeros(1, 1, 16, dtype=torch.uint8)
    block[0, 0, 0] = 0x7A  # 0xA is -1, 0x7 is 6
    numbers = decode_mxfp4(block, torch.tensor([[128]], dtype=torch.uint8))
    assert numbers[0, :3].tolist() == [-2.0, 12.0, 0.0]


@pytest.mark.parametrize("exponent", [0, 1, 126, 127, 128, 200, 254])
def test_numbers_are_the_products_of_the_specification(exponent: int) -> None:
    block = torch.tensor([*range(0x00, 0x100, 0x11)], dtype=torch.uint8).view(1, 1, 16)  # 00 11 22 ... FF
    numbers = decode_mxfp4(block, torch.tensor([[exponent]], dtype=torch.uint8))[0].tolist()
    for code, value in enumerate(E2M1_VALUES):
        expected = math.ldexp(value, exponent - 127)
        if abs(expected) > torch.finfo(torch.float32).max:
            expected = math.copysign(math.inf, expected)
        assert numbers[2 * code] == numbers[2 * code + 1] == expected


def test_exponent_that_means_nan_is_refused() -> None:
    blocks, exponents = _every_byte(1, 4, 4), torch.full((1, 4, 4), 120, dtype=torch.uint8)
    exponents[0, 3, 1] = 255
    with pytest.raises(ValueError, match="NaN"):
        decode_mxfp4(blocks, exponents)
