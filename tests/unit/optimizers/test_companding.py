"""Moments in 8 bits: what a code says, and that a value which has a code keeps it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from atomtrain.optimizers.companding import (
    BLOCK,
    WHOLE,
    Buffer,
    decode_first,
    decode_second,
    encode_first,
    encode_second,
)

SCALES = torch.tensor([1e-33, 3.3e-20, 7e-7, 0.1, 1.0, 1.7, 3e4, 2.9e30])
LEAST, MOST = WHOLE + 2**-13, WHOLE + 1 - 2**-13
"""Between these are the random numbers."""


def buffer(values: Tensor) -> Buffer:
    padded = torch.zeros(-(-values.numel() // BLOCK) * BLOCK)
    padded[: values.numel()] = values
    return Buffer(padded, values.numel())


def blocks(codes: range, largest: int) -> Tensor:
    """Return for each scale every code, each block with the largest one in it."""
    all_codes = torch.tensor(list(codes), dtype=torch.int8)
    rows = [
        torch.cat([torch.full((1,), largest, dtype=torch.int8), some])
        for some in all_codes.split(BLOCK - 1)
    ]
    padding = torch.zeros(BLOCK, dtype=torch.int8)
    return torch.cat([torch.cat([row, padding])[:BLOCK] for row in rows] * len(SCALES))


def scales_of(codes: Tensor) -> Tensor:
    return SCALES.repeat_interleave(codes.numel() // BLOCK // len(SCALES))


def test_codes_say_what_the_documentation_says() -> None:
    first, second = blocks(range(-127, 128), -127), blocks(range(-128, 128), 127)
    out, spare = buffer(torch.empty(first.numel())), buffer(torch.zeros(first.numel()))
    decode_first(first, scales_of(first), out, spare)
    roots = first.double() / 127
    expected = scales_of(first).double().repeat_interleave(BLOCK) * roots * roots.abs()
    torch.testing.assert_close(out.used.double(), expected, rtol=3e-7, atol=0)
    out = buffer(torch.empty(second.numel()))
    decode_second(second, scales_of(second), out)
    roots = (second.double() + 129) / 256
    expected = scales_of(second).double().repeat_interleave(BLOCK) * roots * roots
    torch.testing.assert_close(out.used.double(), expected, rtol=3e-7, atol=0)


@pytest.mark.parametrize("fraction", [LEAST, WHOLE + 0.5, MOST])
def test_a_value_that_has_a_code_keeps_it_whatever_the_random_number(fraction: float) -> None:
    """The largest of a block above all: a code more would be one of the other sign."""
    for which, codes in (
        ("first", blocks(range(-127, 128), -127)),
        ("first", blocks(range(-127, 128), 127)),
        ("second", blocks(range(-128, 128), 127)),
    ):
        values, spare = buffer(torch.empty(codes.numel())), buffer(torch.zeros(codes.numel()))
        found, scales = torch.empty_like(codes), torch.empty(codes.numel() // BLOCK)
        fractions = torch.full((codes.numel(),), fraction)
        if which == "first":
            decode_first(codes, scales_of(codes), values, spare)
            encode_first(values, found, scales, fractions, spare)
        else:
            decode_second(codes, scales_of(codes), values)
            encode_second(values, found, scales, fractions, spare)
        assert torch.equal(found, codes), which
        torch.testing.assert_close(scales, scales_of(codes), rtol=3e-7, atol=0)


@pytest.mark.parametrize("fraction", [LEAST, WHOLE + 0.5, MOST])
def test_roots_become_one_of_the_codes_beside_them(fraction: float) -> None:
    torch.manual_seed(3)
    for exponent in (-30, -8, 0, 12):
        values = torch.randn(40 * BLOCK - 5) * 10.0**exponent
        fractions = torch.full((40 * BLOCK,), fraction)
        codes, scales = torch.empty(values.numel(), dtype=torch.int8), torch.empty(40)
        spare = buffer(torch.zeros(values.numel()))
        encode_first(buffer(values), codes, scales, fractions, spare)
        largest = scales.repeat_interleave(BLOCK)[: values.numel()].double()
        exact = 127 * values.double().sgn() * (values.double().abs() / largest).sqrt()
        assert float((codes - exact).abs().max()) < 1
        assert float((codes - (exact + fraction - WHOLE).floor()).abs().mean()) < 1e-3
        encode_second(buffer(values.abs()), codes, scales, fractions, spare)
        exact = 256 * (values.double().abs() / largest).sqrt()
        assert float((codes.int() + 129 - exact.clamp(min=1)).abs().max()) < 1
        rounded = (exact + fraction - WHOLE).floor().clamp(min=1)
        assert float((codes.int() + 129 - rounded).abs().mean()) < 1e-3


def test_blocks_of_zeros_and_of_what_is_not_finite() -> None:
    values = torch.ones(3 * BLOCK)
    values[:BLOCK] = 0
    values[BLOCK] = torch.inf
    fractions = torch.full((3 * BLOCK,), MOST)
    codes, scales = torch.empty(3 * BLOCK, dtype=torch.int8), torch.empty(3)
    spare, out = buffer(torch.zeros(3 * BLOCK)), buffer(torch.empty(3 * BLOCK))
    encode_first(buffer(values), codes, scales, fractions, spare)
    decode_first(codes, scales, out, spare)
    assert bool((out.used[:BLOCK] == 0).all())
    assert bool((out.used[2 * BLOCK :] == 1).all()), "another block is not spoilt"
    assert not bool(out.used[BLOCK].isfinite())
    encode_second(buffer(values), codes, scales, fractions, spare)
    assert bool((codes[:BLOCK] == -128).all())
    decode_second(codes, scales, out)
    assert bool((out.used[:BLOCK] == 0).all())
    assert bool((out.used[2 * BLOCK :] == 1).all())
    assert not bool(out.used[BLOCK].isfinite())
