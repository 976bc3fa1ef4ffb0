"""FP8 is found in wide numbers, tile by tile; what is not FP8 is held in equal steps."""

from __future__ import annotations

import pytest
import torch

from atomtrain.models.forms import Form, form_of, to_fp8
from atomtrain.models.lora_config import parse_lora
from atomtrain.models.quantised import dequantise, dequantise_in_torch
from tests.support.quantised_folders import fp8

_E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        ((256, 384), (128, 128)),
        ((40, 48), (16, 16)),
        ((40, 40), (16, 16)),  # the last tiles are smaller
        ((48, 64), (0, 0)),  # one scale
        ((48, 64), (1, 64)),  # one a row
    ],
)
def test_published_numbers_come_back(shape: tuple[int, int], tile: tuple[int, int]) -> None:
    torch.manual_seed(0)
    drawn = torch.randn(shape)
    drawn[:3] = 0
    if tile != (1, 64):
        drawn[16:32, :16] = 0
    size = (tile[0] or shape[0], tile[1] or shape[1])
    _, wide = fp8("a.weight", drawn + 1e-9, size)
    packed = to_fp8(wide, tile)
    assert packed.codes.dtype == torch.int8
    assert packed.codes.shape == shape
    assert torch.equal(dequantise(*packed, torch.float32), wide)
    for dtype in (torch.bfloat16, torch.float16):
        expected = wide.to(dtype)
        assert torch.equal(dequantise(*packed, dtype), expected)
        assert torch.equal(dequantise_in_torch(*packed, dtype), expected)


def test_tiles_whose_largest_code_is_another_come_back() -> None:
    """Scales may be powers of two, or have room to spare; a scale may be subnormal."""
    torch.manual_seed(0)
    for largest in range(1, 127, 6):
        codes = torch.randint(0, largest + 1, (16, 16))
        codes[3, 5] = largest
        for scale in (2.0**-9, 0.00123, 3e-39, float(torch.rand(()))):
            wide = _E4M3[codes] * scale * (torch.randint(0, 2, (16, 16)) * 2 - 1)
            packed = to_fp8(wide, (16, 16))
            assert torch.equal(dequantise(*packed, torch.float32), wide), (largest, scale)
            assert (packed.scales > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_tiles_are_held_in_equal_steps(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    _, wide = fp8("a.weight", torch.randn(32, 48))
    wide[16:, 16:32] = torch.randn(16, 16)
    wide[20, 16:32] = 0
    packed = to_fp8(wide, (16, 16))
    assert (packed.scales.view(torch.float32) < 0).sum() == 16  # rows of one tile
    held, reference = dequantise(*packed, dtype), dequantise_in_torch(*packed, dtype)
    assert torch.equal(held, reference)
    expected = wide.to(dtype)
    is_equal = held == expected
    assert is_equal[:16].all()
    assert is_equal[:, :16].all()
    assert is_equal[:, 32:].all()
    assert not is_equal[16:, 16:32].all()
    most = wide[16:, 16:32].abs().amax(1, keepdim=True)
    error = (held.float() - expected.float())[16:, 16:32].abs()
    assert (error <= most / 127 * 0.51 + most * torch.finfo(dtype).eps).all()


def test_the_form_follows_folder_and_size() -> None:
    few = parse_lora("bits=8").published_as({"quant_method": "fp8", "weight_block_size": [16, 32]})
    assert form_of(few, 64) == Form(8, "fp8", (16, 32))
    assert form_of(few, 100) == Form(8)  # blocks of two numbers would take more than they spare
    whole = parse_lora("bits=8").published_as({"quant_method": "fp8"})
    assert form_of(whole, 100) == Form(8, "fp8", (0, 0))
    four = parse_lora("bits=4").published_as({"quant_method": "fp8"})
    assert form_of(four, 64) == Form(4)
    mixture = parse_lora("bits=4").published_as({"quant_method": "mxfp4"})
    assert form_of(mixture, 64) == Form(4)
    assert form_of(mixture, 64, transposed_experts=True) == Form(4, "mxfp4")
    assert form_of(mixture, 48, transposed_experts=True) == Form(4)
