"""FP8 is found in wide numbers, tile by tile; what is not FP8 is held in equal steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from atomtrain.errors import ConfigError
from atomtrain.models.forms import Form, form_of, to_fp8, to_nf4, to_steps, to_steps8
from atomtrain.models.lora_config import (
    FP8,
    MXFP4,
    NF4,
    ROWS,
    STEPS,
    STEPS8,
    LoraConfig,
    parse_lora,
)
from atomtrain.models.quantised import (
    counting,
    dequantise,
    dequantise_in_torch,
    exponents,
    quantise,
)
from tests.support.quantised_folders import awq, fp8, gptq, int8, nf4

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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("nested", [True, False])
def test_nf4_keeps_what_was_rounded(dtype: str, nested: bool) -> None:
    torch.manual_seed(0)
    _, wide = nf4("a.weight", torch.randn(400, 192), nested=nested, dtype=dtype)
    packed = to_nf4(wide)
    assert packed.codes.shape == (400, 96)
    kept = getattr(torch, dtype)
    assert torch.equal(dequantise(*packed, kept).float(), wide)
    assert torch.equal(dequantise_in_torch(*packed, kept).float(), wide)
    plain = quantise(wide, 4)
    bfloat16 = dequantise(plain.codes, plain.scales.bfloat16(), torch.bfloat16).float()
    assert nested or dtype != "bfloat16" or not torch.equal(bfloat16, wide)
    other = torch.randn(40, 192)
    assert torch.equal(dequantise(*to_nf4(other), kept), dequantise(*quantise(other, 4), kept))


@pytest.mark.parametrize("make", [gptq, awq])
def test_differences_of_codes_are_kept(make: Callable[..., tuple[Any, torch.Tensor]]) -> None:
    torch.manual_seed(0)
    more = {} if make is awq else {"mixed": False}
    _, wide = make("a.weight", torch.randn(24, 256), group=128, **more)
    wide[5, :128] = 0
    packed = to_fp8(wide, (1, 128), STEPS)
    assert (packed.scales > 0).all()
    assert torch.equal(dequantise(*packed, torch.float32), wide)
    assert torch.equal(dequantise(*packed, torch.bfloat16), wide.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("make", "group"),
    [
        (partial(gptq, mixed=False), 128),
        (partial(gptq, mixed=False), 16),
        (partial(gptq, mixed=False), 256),
        (partial(gptq, mixed=False, bits=2), 128),
        (awq, 32),
    ],
)
def test_codes_of_four_bits_stay_in_four_bits(
    make: Callable[..., tuple[Any, torch.Tensor]], group: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    _, wide = make("a.weight", torch.randn(48, 256), group=group)
    wide[5, :group] = 0
    wide[6, :group] = wide[6, :group].clamp(min=0)  # no number is below the zero point
    wide[7, :group] = 2 * wide[7, :group]  # every second step is not used
    packed = to_steps(wide, (1, group if group < 256 else 0))
    assert packed.codes.dtype == torch.uint8
    assert packed.codes.shape == (48, 128)
    assert packed.scales.shape == (48, max(4, 256 // group))
    assert (packed.scales < 0).all()
    assert torch.equal(dequantise(*packed, dtype), wide.to(dtype))
    assert torch.equal(dequantise_in_torch(*packed, dtype), wide.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [16, 128, 256])
@pytest.mark.parametrize("later", [0, 1])
def test_codes_of_eight_bits_stay_in_eight_bits(group: int, later: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    make = partial(gptq, bits=8, later=later, mixed=False)
    _, wide = make("a.weight", torch.randn(48, 256), group=group)
    scale = float(torch.tensor(0.013).half())
    wide[5, :group] = 0
    wide[6, :group] = scale * torch.linspace(0, 255, group).round()  # all the zero point can move
    wide[7, :group] = scale * torch.linspace(-255, 0, group).round()
    wide[8, :group] = scale * (torch.arange(group) % 256 - 128)
    wide[9, :group] = 3 * wide[8, :group]  # two of three steps are not used
    wide[10, :group] = 2**-24 * (torch.arange(group) % 200)  # the least float16
    packed = to_steps8(wide, (1, group if group < 256 else 0))
    assert (packed.codes.dtype, packed.codes.shape) == (torch.int8, (48, 256))
    assert packed.scales.shape == (48, max(4, 256 // group))
    assert counting(packed.scales)[0].all()
    assert torch.equal(dequantise(*packed, dtype), wide.to(dtype))
    assert torch.equal(dequantise_in_torch(*packed, dtype), wide.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tiles_without_codes_of_eight_bits_are_in_equal_steps(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    _, wide = gptq("a.weight", torch.randn(8, 256), bits=8, group=64, mixed=False)
    wide[1, :64] = torch.randn(64)
    wide[2, :64] = torch.arange(64).float() * 5 / 64  # 316 steps
    wide[2, :2] = torch.tensor([1, 2]) / 64
    wide[3, :64] = 2053 / 2048 * (torch.arange(64) % 3)  # a scale that float16 has not
    packed = to_steps8(wide, (1, 64))
    others = ~counting(packed.scales)[0].repeat_interleave(64, 1)
    expected = torch.zeros_like(others)
    expected[1:4, :64] = True
    assert torch.equal(others, expected)
    made = dequantise(*packed, dtype)
    assert torch.equal(made, dequantise_in_torch(*packed, dtype))
    assert torch.equal(made[~others], wide.to(dtype)[~others])
    steps = dequantise(*quantise(wide[1:4, :64].contiguous(), 8), dtype)
    assert torch.equal(made[1:4, :64], steps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [16, 128])
def test_tiles_without_such_codes_are_in_nf4(group: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    _, wide = gptq("a.weight", torch.randn(8, 256), group=group, mixed=False)
    wide[1, :group] = torch.randn(group)
    wide[2, :group] = torch.randint(-9, 8, (group,)) / 64  # 17 numbers
    wide[2, :2] = torch.tensor([-9, 7]) / 64
    wide[3, :group] = torch.randint(0, 2, (group,)) * (1 + 2**-23)  # no room in the scale
    wide[3, 0] = 1 + 2**-23
    packed = to_steps(wide, (1, group))
    block = min(group, 64)
    others = (packed.scales > 0).repeat_interleave(block, 1)
    expected = torch.zeros_like(others)
    expected[1:4, :group] = True
    assert torch.equal(others, expected)
    made = dequantise(*packed, dtype)
    assert torch.equal(made, dequantise_in_torch(*packed, dtype))
    assert torch.equal(made[~others], wide.to(dtype)[~others])
    nf4 = dequantise(*quantise(wide[1:4, :group].reshape(-1, block).contiguous(), 4), dtype)
    assert torch.equal(made[1:4, :group], nf4.view(3, group))


def test_rows_of_steps_have_one_scale() -> None:
    torch.manual_seed(0)
    stored, wide = int8("a.weight", torch.randn(24, 256))
    packed = to_fp8(wide, (0, 0), ROWS)
    assert torch.equal(packed.codes, stored["a.weight"])
    assert packed.scales.shape == (24, 4)
    torch.testing.assert_close(dequantise(*packed, torch.float32), wide, rtol=2**-22, atol=0)


def test_the_form_follows_folder_and_size() -> None:
    few = parse_lora("bits=8").published_as({"quant_method": "fp8", "weight_block_size": [16, 32]})
    assert form_of(few, 64) == Form(8, "fp8", (16, 32))
    assert form_of(few, 100) == Form(8)  # blocks of two numbers would take more than they spare
    whole = parse_lora("bits=8").published_as({"quant_method": "fp8"})
    assert form_of(whole, 100) == Form(8, "fp8", (0, 0))
    four = parse_lora("bits=4").published_as({"quant_method": "fp8"})
    assert form_of(four, 64) == Form(4)
    ordered = parse_lora("bits=8").published_as(
        {"quant_method": "gptq", "bits": 4, "group_size": 128}
    )
    assert form_of(ordered, 256) == Form(8, "steps", (1, 128))
    narrow = parse_lora("bits=4").published_as({"quant_method": "awq", "bits": 4})
    assert form_of(narrow, 256) == Form(4, "steps", (1, 0))
    wide = parse_lora("bits=8").published_as({"quant_method": "gptq", "bits": 8})
    assert form_of(wide, 256) == Form(8, "steps8", (1, 0))
    few = parse_lora("bits=4").published_as({"quant_method": "gptq", "bits": 8})
    assert form_of(few, 256) == Form(4)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}
    mixed = parse_lora("bits=4").published_as(settings)
    assert mixed.published == "steps 1x128 sorted"
    assert form_of(mixed, 256) == Form(4, "steps", (1, 128), sorts=True)
    whole = parse_lora("bits=4").published_as({**settings, "group_size": -1})
    assert form_of(whole, 256) == Form(4, "steps", (1, 0))  # one group has one order
    mixture = parse_lora("bits=4").published_as({"quant_method": "mxfp4"})
    assert form_of(mixture, 64) == Form(4)
    assert form_of(mixture, 64, transposed_experts=True) == Form(4, "mxfp4")
    assert form_of(mixture, 48, transposed_experts=True) == Form(4)


@pytest.mark.parametrize(
    ("published", "bits"),
    [(MXFP4, 8), (NF4, 8), (ROWS, 4), (f"{FP8} 128x128", 4), (f"{STEPS8} 1x64", 4)],
)
def test_numbers_are_kept_in_their_own_bits(published: str, bits: int) -> None:
    with pytest.raises(ConfigError, match=f"goes with bits={12 - bits}, not with bits={bits}"):
        LoraConfig(bits=bits, published=published)
    kept = LoraConfig(bits=12 - bits, published=published)
    assert dataclasses.replace(kept, bits=None).published == published


def test_exponents_of_a_byte_are_exact_powers_of_two() -> None:
    every = torch.arange(256)
    powers = 2.0 ** (every.double() - 127)
    assert torch.equal(exponents(every.to(torch.uint8)), powers.float())
    assert exponents(torch.zeros(1, dtype=torch.uint8)) > 0
