"""The forms of few bits in which a frozen matrix is held, and how published numbers are kept.

Weights reach this module wide, and possibly put together from several tensors of a folder. Codes
and scales that mean the same numbers are found in them; every number is compared, and what has none
is held as in other folders.

- `mxfp4`: see `models/quantised.py`.
- `nf4` (bitsandbytes): the published numbers are a level times a float32 scale, rounded to 16 bits.
  A scale that gives them all is found between those that give each.
- `fp8` (`models/dequantised/floats.py`): codes e4m3 times a float32 scale for each tile.
- `steps` (GPTQ and AWQ of 4 bits): the difference of a code and a zero point, of 4 bits each,
  times a scale for each group of a row. 8 bits hold the difference, which e4m3 has, too; 4 bits the
  code. The zero point then is where a scale of 16 bits has nothing.
- `steps8` (GPTQ of 8 bits): the same of 8 bits, with scales that float16 has.
- `sorted` behind one of these (GPTQ's `desc_act`): a linear layer's columns are sorted by group,
  and what they multiply is, too. Experts are not.
- `rows` (bitsandbytes of 8 bits): equal steps of the largest number of a row. The last bit of a
  float32 may be another.

With 8 bits a tile of other numbers is in equal steps, with 4 in NF4; the sign of its scale tells
them apart. All but `mxfp4` have scales whose bits are held as int32, so that they stay float32
where a model becomes bfloat16.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from atomtrain.models.lora_config import FP8, MXFP4, NF4, ROWS, STEPS, STEPS8, LoraConfig
from atomtrain.models.quantised import (
    E4M3,
    FP8_TYPE,
    MX_BLOCK,
    ZERO_POINT,
    Quantised,
    block_of,
    counted,
    dequantise,
    empty_mxfp4,
    empty_quantised,
    quantise,
    to_mxfp4,
)

_LEAST_BLOCK = 8
_LOOKED_AT = 256
"""Elements of a tile by which scales are told from others before all are compared."""
_AT_ONCE = 1 << 22
"""Elements that are compared at once: what is made meanwhile stays small."""
_CODES = {
    FP8: sorted((value for value in set(E4M3) if value > 0), reverse=True),
    STEPS: [float(value) for value in range(15, 0, -1)],
    STEPS8: [float(value) for value in range(1, 65)],
    ROWS: [],
}
"""What the largest number of a tile may be times its scale; of `steps8` the least difference."""
_MOST_STEPS, _MOST_STEPS_8 = 15, 255
"""Of codes of 4 bits and of 8."""
_BITS_OF = {torch.bfloat16: 8, torch.float16: 11}
"""Of a number's fraction, the first one included."""


class Form(NamedTuple):
    """How a matrix `[O, I]` is held."""

    bits: int
    published: str | None = None
    """Which numbers are kept; `None` for equal steps and NF4 that are made here."""
    tile: tuple[int, int] = (0, 0)
    """Rows and columns that share a published scale; 0 stands for all."""
    sorts: bool = False
    """Whether columns are sorted by tile: see `MadeWide.held` in `models/narrow.py`."""

    def empty(self, rows: int, inputs: int, like: Tensor) -> Quantised:
        """Return room for a matrix on the device of another.

        Raises:
            ConfigError: as `quantised.block_of`.
        """
        if self.published == MXFP4:
            return empty_mxfp4(rows, inputs, like)
        codes, scales = empty_quantised(rows, inputs, self.bits, like)
        if self.has_bits_as_scales:
            count = inputs // _block(inputs, self.tile)
            return Quantised(codes, like.new_empty((rows, count), dtype=torch.int32))
        return Quantised(codes, scales)

    @property
    def has_bits_as_scales(self) -> bool:
        """Whether scales stay float32 whatever the model becomes."""
        return self.published == NF4 or self.published in _CODES

    def packed(self, weight: Tensor) -> Quantised:
        """Return `[O, I]` float32 in this form."""
        if self.published == MXFP4:
            return to_mxfp4(weight)
        if self.published == NF4:
            return to_nf4(weight)
        if self.published == STEPS and self.bits == 4:
            return to_steps(weight, self.tile)
        if self.published == STEPS8:
            return to_steps8(weight, self.tile)
        if self.published in _CODES:
            return to_fp8(weight, self.tile, self.published)
        return quantise(weight, self.bits)


@functools.cache  # equal modules are known by holding the same
def form_of(config: LoraConfig, inputs: int, *, transposed_experts: bool = False) -> Form:
    """Return the form of a matrix of `inputs` columns, as `config` asks for it."""
    assert config.bits is not None
    kind, tile = config.kept
    if kind == MXFP4 and transposed_experts and inputs % MX_BLOCK == 0:
        return Form(config.bits, MXFP4)
    kept = kind == NF4 or (kind in _CODES and _block(inputs, tile) >= _LEAST_BLOCK)
    if not kept or inputs % 2:
        return Form(config.bits)
    return Form(config.bits, kind, tile, config.sorts)


def _block(inputs: int, tile: tuple[int, int]) -> int:
    """Return how many inputs share a kept scale: a divisor of those that share a published one."""
    return math.gcd(block_of(inputs), tile[1] or inputs)


def to_fp8(weight: Tensor, tile: tuple[int, int], kind: str = FP8) -> Quantised:
    """Return `[O, I]` float32 as `fp8`, `steps` or `rows`: the same numbers, if they were made of
    it in such tiles."""
    weight = weight.float()
    outputs, inputs = weight.shape
    high, wide = tile[0] or outputs, tile[1] or inputs
    found = _scales_of(weight, high, wide, _CODES[kind], _are_fp8, _neighbours)
    found = found.repeat_interleave(high, 0)[:outputs]  # [O, tiles]
    block = _block(inputs, tile)
    of = torch.arange(0, inputs, block) // wide
    scales = found[:, of]  # [O, I/block]
    blocks = weight.unflatten(1, (-1, block))
    kept = scales > 0
    numbers = (blocks / torch.where(kept, scales, 1.0)[..., None]).to(FP8_TYPE).view(torch.int8)
    if not kept.all():
        most = blocks.abs().amax(-1)
        most = most.amax(-1, keepdim=True).expand_as(most) if kind == ROWS else most
        steps = torch.where(most > 0, most, 1.0)
        equal = (blocks / steps[..., None] * 127).round().to(torch.int8)
        numbers = torch.where(kept[..., None], numbers, equal)
        scales = torch.where(kept, scales, -steps)
    return Quantised(numbers.flatten(1), scales.view(torch.int32))


def to_steps(weight: Tensor, tile: tuple[int, int]) -> Quantised:
    """Return `[O, I]` float32 as `steps` of 4 bits: the same numbers, if they were made of codes of
    at most 4 bits in such tiles, with scales of 16 bits."""
    inputs = weight.shape[1]
    wide, block = tile[1] or inputs, _block(inputs, tile)
    of = torch.arange(0, inputs, block) // wide
    codes_of_size = [float(value) for value in range(1, _MOST_STEPS + 1)]

    def packed(rows: Tensor) -> Quantised:
        # The largest scale that does has the fewest steps, which 4 bits have room for.
        found = _scales_of(rows, 1, wide, codes_of_size, _are_steps, lambda exact: [exact])[:, of]
        blocks = rows.unflatten(1, (-1, block))  # [O, I/block, block]
        kept = found > 0
        steps = (blocks / torch.where(kept, found, 1.0)[..., None]).round()
        zeros = -steps.amin(-1).clamp(max=0)
        numbers = (steps + zeros[..., None]).where(kept[..., None], 0.0).flatten(1).to(torch.uint8)
        codes = numbers[:, ::2] | (numbers[:, 1::2] << 4)
        scales = (-found).view(torch.int32) | zeros.where(kept, 0.0).int()
        if not kept.all():
            nf4 = quantise(blocks.flatten(0, 1), 4)  # a block is a row
            others = kept.repeat_interleave(block // 2, 1)
            codes = torch.where(others, codes, nf4.codes.view_as(codes))
            scales = torch.where(kept, scales, nf4.scales.view(torch.int32).view_as(scales))
        return Quantised(codes, scales)

    return _by_rows(weight, packed)


def to_steps8(weight: Tensor, tile: tuple[int, int]) -> Quantised:
    """Return `[O, I]` float32 as `steps8`: the same numbers, if they were made of codes of 8 bits
    in such tiles, with scales that float16 has."""
    inputs = weight.shape[1]
    wide, block = tile[1] or inputs, _block(inputs, tile)
    of = torch.arange(0, inputs, block) // wide

    def packed(rows: Tensor) -> Quantised:
        found = _scales_of(
            rows, 1, wide, _CODES[STEPS8], _are_steps8, lambda exact: [exact], _least
        )[:, of]
        blocks = rows.unflatten(1, (-1, block))  # [O, I/block, block]
        kept = found > 0
        steps = (blocks / torch.where(kept, found, 1.0)[..., None]).round()
        # Codes of a byte with a sign: where the differences are none, they are moved into it.
        zeros = (-128 - steps.amin(-1)).clamp(min=0) + (127 - steps.amax(-1)).clamp(max=0)
        numbers = (steps + zeros[..., None]).where(kept[..., None], 0.0)
        words = counted(torch.where(kept, found, 1.0), zeros.where(kept, 0.0))
        codes = numbers.flatten(1).to(torch.int8)
        if not kept.all():
            equal = quantise(blocks.flatten(0, 1), 8)  # a block is a row
            others = kept.repeat_interleave(block, 1)
            codes = torch.where(others, codes, equal.codes.view_as(codes))
            most = torch.where(equal.scales > 0, equal.scales, 1.0).view_as(found)
            words = torch.where(kept, words, (-most).view(torch.int32))
        return Quantised(codes, words)

    return _by_rows(weight, packed)


def _by_rows(weight: Tensor, packed: Callable[[Tensor], Quantised]) -> Quantised:
    """Return what a matrix becomes, some rows at a time, so that little is made meanwhile."""
    rows = weight.float().split(max(1, _AT_ONCE // weight.shape[1]))
    return Quantised(*map(torch.cat, zip(*map(packed, rows), strict=True)))


def _scales_of(
    weight: Tensor,
    high: int,
    wide: int,
    codes: Iterable[float],
    fit: Callable[[Tensor, Tensor], Tensor],
    near: Callable[[Tensor], Iterable[Tensor]],
    one_of: Callable[[Tensor], Tensor] = lambda tiles: tiles.abs().amax(1),
) -> Tensor:
    """Return the scale of each tile, 0 where none fits its numbers.

    Args:
        weight: `[O, I]` float32.
        high: Rows of a tile.
        wide: Columns of a tile.
        codes: What the largest number may be times the scale; the first ones go before.
        fit: Returns of tiles `[T, numbers]` and their scales `[T]` which ones fit.
        near: Returns which scales are tried, given quotients.
        one_of: Returns the number of each tile that the codes are of; zero where all are.
    """
    outputs, inputs = weight.shape
    down, across = -(-outputs // high), -(-inputs // wide)
    filled = F.pad(weight, (0, across * wide - inputs, 0, down * high - outputs))
    tiles = filled.view(down, high, across, wide).transpose(1, 2).reshape(down * across, -1)
    peaks = one_of(tiles)
    scales = (peaks == 0).float()
    sample = tiles[:, :: -(-tiles.shape[1] // min(_LOOKED_AT, -(-tiles.shape[1] // 8)))]
    # A tile's largest number mostly is the largest code: what made it divided so.
    for code in codes:
        left = torch.nonzero(scales == 0)[:, 0]
        if not len(left):
            break
        for tried in near(peaks[left] / code):
            likely = torch.nonzero(fit(sample[left], tried))[:, 0]
            for some in likely.split(max(1, _AT_ONCE // tiles.shape[1])):
                whole = some[fit(tiles[left[some]], tried[some])]
                scales[left[whole]] = tried[whole]
    return scales.view(down, across)


def _neighbours(exact: Tensor) -> Iterable[Tensor]:
    """Return a quotient and the numbers next to it: products of codes are rounded."""
    return exact, *(exact.nextafter(torch.full_like(exact, e)) for e in (0, math.inf))


def _are_fp8(tiles: Tensor, scales: Tensor) -> Tensor:
    """Return for each tile whether all its numbers are a code times its scale."""
    codes = (tiles / scales[:, None]).to(FP8_TYPE).float()
    return (codes * scales[:, None] == tiles).all(1)


def _are_steps(tiles: Tensor, scales: Tensor) -> Tensor:
    """Return for each tile whether all its numbers are a code less a zero point, of 4 bits each,
    times its scale, which has room for that point."""
    steps = (tiles / scales[:, None]).round()
    span = steps.amax(1).clamp(min=0) - steps.amin(1).clamp(max=0)
    has_room = scales.view(torch.int32) & ZERO_POINT == 0
    return (steps * scales[:, None] == tiles).all(1) & (span <= _MOST_STEPS) & has_room


def _least(tiles: Tensor) -> Tensor:
    """Return the smallest difference between two numbers of each tile, or of one and zero, that is
    not zero; zero where there is none. It is the scale, or few times that."""
    gaps = F.pad(tiles, (0, 1)).sort(1).values.diff(dim=1)
    least = torch.where(gaps > 0, gaps, math.inf).amin(1)
    return torch.where(least < math.inf, least, 0.0)


def _are_steps8(tiles: Tensor, scales: Tensor) -> Tensor:
    """Return for each tile whether all its numbers are a code less a zero point, of 8 bits each,
    times its scale, which float16 has."""
    steps = (tiles / scales[:, None]).round()
    most, least = steps.amax(1), steps.amin(1)
    span = most.clamp(min=0) - least.clamp(max=0)
    has_room = (scales.half().float() == scales) & (least >= -_MOST_STEPS_8)
    return (steps * scales[:, None] == tiles).all(1) & (span <= _MOST_STEPS_8) & has_room


def to_nf4(weight: Tensor) -> Quantised:
    """Return `[O, I]` float32 in NF4: the same numbers, if they were NF4 rounded to 16 bits."""

    def packed(rows: Tensor) -> Quantised:
        codes, scales = quantise(rows, 4)
        blocks = rows.unflatten(1, (scales.shape[1], -1))
        units = dequantise(codes, torch.ones_like(scales), torch.float32).view_as(blocks)
        left = (units * scales[..., None] != blocks).any(-1)
        for dtype in _BITS_OF:
            tried = _scales_between(units, blocks, dtype)
            fit = left & ((units * tried[..., None]).to(dtype) == blocks).all(-1)
            scales = torch.where(fit, tried, scales)
            left &= ~fit
        return Quantised(codes, scales.view(torch.int32))

    return _by_rows(weight, packed)


def _scales_between(units: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the middle of the scales by which levels become a block's numbers, when rounded."""
    levels, numbers = units.double().abs(), blocks.double().abs()
    fraction, exponent = numbers.frexp()
    half = torch.ldexp(torch.ones_like(numbers), exponent - _BITS_OF[dtype] - 1)
    below = torch.where(fraction == 0.5, half / 2, half)  # neighbours of powers of two are nearer
    least = torch.where(levels > 0, (numbers - below) / levels, 0.0).amax(-1)
    most = torch.where(levels > 0, (numbers + half) / levels, math.inf).amin(-1)
    return ((least + most) / 2).float()
