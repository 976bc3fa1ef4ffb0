"""The forms of few bits in which a frozen matrix is held, and how FP8 is found in wide numbers.

A folder in FP8 has codes e4m3 and a float32 scale for each tile of a matrix (see
`models/dequantised/floats.py`). Its weights reach this module wide, and possibly put together from
several tensors. A tile whose numbers are codes times one scale gets these back, whichever they
were: every number is compared. A tile of other numbers (what such a folder has wide, or e5m2) is
held in equal steps, as 8 bits of other folders are; its scales are negative.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from atomtrain.models.lora_config import FP8, MXFP4, LoraConfig
from atomtrain.models.quantised import (
    E4M3,
    FP8_TYPE,
    MX_BLOCK,
    Quantised,
    block_of,
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
_CODES = sorted((value for value in set(E4M3) if value > 0), reverse=True)


class Form(NamedTuple):
    """How a matrix `[O, I]` is held."""

    bits: int
    published: str | None = None
    """`fp8` or `mxfp4` where its numbers are kept; `None` for equal steps and NF4."""
    tile: tuple[int, int] = (0, 0)
    """Rows and columns that share a scale in FP8; 0 stands for all."""

    def empty(self, rows: int, inputs: int, like: Tensor) -> Quantised:
        """Return room for a matrix on the device of another.

        Raises:
            ConfigError: as `quantised.block_of`.
        """
        if self.published == MXFP4:
            return empty_mxfp4(rows, inputs, like)
        if self.published == FP8:
            codes = like.new_empty((rows, inputs), dtype=torch.int8)
            count = inputs // _block(inputs, self.tile)
            return Quantised(codes, like.new_empty((rows, count), dtype=torch.int32))
        return empty_quantised(rows, inputs, self.bits, like)

    def packed(self, weight: Tensor) -> Quantised:
        """Return `[O, I]` float32 in this form."""
        if self.published == MXFP4:
            return to_mxfp4(weight)
        return to_fp8(weight, self.tile) if self.published == FP8 else quantise(weight, self.bits)


@functools.cache  # equal modules are known by holding the same
def form_of(config: LoraConfig, inputs: int, *, transposed_experts: bool = False) -> Form:
    """Return the form of a matrix of `inputs` columns, as `config` asks for it."""
    assert config.bits is not None
    kind, tile = config.kept
    if kind == MXFP4 and transposed_experts and inputs % MX_BLOCK == 0:
        return Form(config.bits, MXFP4)
    if kind == FP8 and inputs % 2 == 0 and _block(inputs, tile) >= _LEAST_BLOCK:
        return Form(config.bits, FP8, tile)
    return Form(config.bits)


def _block(inputs: int, tile: tuple[int, int]) -> int:
    """Return how many inputs share a kept scale: a divisor of those that share a published one."""
    return math.gcd(block_of(inputs), tile[1] or inputs)


def to_fp8(weight: Tensor, tile: tuple[int, int]) -> Quantised:
    """Return `[O, I]` float32 in FP8: the same numbers, if they were made of it in such tiles."""
    weight = weight.float()
    outputs, inputs = weight.shape
    high, wide = tile[0] or outputs, tile[1] or inputs
    found = _scales_of(weight, high, wide).repeat_interleave(high, 0)[:outputs]  # [O, tiles]
    block = _block(inputs, tile)
    of = torch.arange(0, inputs, block) // wide
    scales = found[:, of]  # [O, I/block]
    blocks = weight.unflatten(1, (-1, block))
    kept = scales > 0
    numbers = (blocks / torch.where(kept, scales, 1.0)[..., None]).to(FP8_TYPE).view(torch.int8)
    if not kept.all():
        most = blocks.abs().amax(-1)
        steps = torch.where(most > 0, most, 1.0)
        equal = (blocks / steps[..., None] * 127).round().to(torch.int8)
        numbers = torch.where(kept[..., None], numbers, equal)
        scales = torch.where(kept, scales, -steps)
    return Quantised(numbers.flatten(1), scales.view(torch.int32))


def _scales_of(weight: Tensor, high: int, wide: int) -> Tensor:
    """Return the scale of each tile, 0 where its numbers are not e4m3 times one scale."""
    outputs, inputs = weight.shape
    down, across = -(-outputs // high), -(-inputs // wide)
    filled = F.pad(weight, (0, across * wide - inputs, 0, down * high - outputs))
    tiles = filled.view(down, high, across, wide).transpose(1, 2).reshape(down * across, -1)
    peaks = tiles.abs().amax(1)
    scales = (peaks == 0).float()
    sample = tiles[:, :: -(-tiles.shape[1] // _LOOKED_AT)]
    # A tile's largest number mostly is the largest code: what made it divided so.
    for code in _CODES:
        left = torch.nonzero(scales == 0)[:, 0]
        if not len(left):
            break
        exact = peaks[left] / code  # the scale, or one of its neighbours, as products are rounded
        for tried in (exact, *(exact.nextafter(torch.full_like(exact, e)) for e in (0, math.inf))):
            likely = torch.nonzero(_are_fp8(sample[left], tried))[:, 0]
            for some in likely.split(max(1, _AT_ONCE // tiles.shape[1])):
                fit = some[_are_fp8(tiles[left[some]], tried[some])]
                scales[left[fit]] = tried[fit]
    return scales.view(down, across)


def _are_fp8(tiles: Tensor, scales: Tensor) -> Tensor:
    """Return for each tile whether all its numbers are a code times its scale."""
    codes = (tiles / scales[:, None]).to(FP8_TYPE).float()
    return (codes * scales[:, None] == tiles).all(1)
