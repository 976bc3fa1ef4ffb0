"""Weights in 8-bit floating point with a scale a block: DeepSeek-V3, Qwen3-FP8 and others.

`X.weight` is e4m3 or e5m2 `[..., O, I]`, `X.weight_scale_inv` has what each block is multiplied by
(https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/README_WEIGHTS.md). The last block of a
row or a column may be smaller. Without `weight_block_size` the scales are of equal blocks: one, or
one a row. Scales of activations are not used: activations stay wide.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atomtrain.models.dequantised.packed import (
    SLICE_ELEMENTS,
    Entries,
    Packed,
    check_part,
    elements,
    exponents,
    part_of,
    unfit,
)
from atomtrain.models.weights.files import WeightFiles

_CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.uint8,
)  # fmt: skip


class _Grid(NamedTuple):
    """How the scales of a matrix lie; all matrices of a tensor have the same."""

    rows: int
    """Of the matrix."""
    columns: int
    high: int
    """Rows of a block."""
    wide: int
    """Columns of a block."""


def find(entries: Entries, settings: Mapping[str, Any]) -> list[Packed]:
    """Return the weights that are stored in 8 bits.

    Raises:
        DataError: one lacks its scales, or these are of another shape or type.
    """
    found = []
    for name, entry in entries.items():
        if entry.dtype not in _CODES:
            continue
        scales = part_of(entries, name, _names_of_scales(name))
        check_part(entries, scales, dtypes=_SCALES, codes=name)
        grid = _grid(entries, name, scales, settings.get("weight_block_size"))
        slices = partial(_slices, name, scales, grid)
        found.append(Packed(name, (name, scales), entry.shape, slices))
    taken = {part for packed in found for part in packed.parts}
    for name in entries:
        if name.endswith("_scale_inv") and name not in taken:
            codes = name.removesuffix("_scale_inv")
            reason = f"but {codes!r} is not in 8-bit floating point"
            raise unfit(entries, name, reason)
    return found


def _names_of_scales(name: str) -> list[str]:
    stem = name.removesuffix("weight")
    others = [] if stem == name else [f"{stem}scale", f"{stem}qscale_weight"]
    return [f"{name}_scale_inv", *others]


def _grid(entries: Entries, name: str, scales: str, block: list[int] | None) -> _Grid:
    shape, stored = entries[name].shape, entries[scales].shape
    if len(shape) < 2 or not elements(shape):
        raise unfit(entries, name, "which is not a matrix")
    *lead, rows, columns = shape
    if block is not None:
        expected = (*lead, -(-rows // block[0]), -(-columns // block[1]))
        check_part(entries, scales, expected, codes=name)
        return _Grid(rows, columns, *block)
    if elements(stored) == 1:
        return _Grid(rows, columns, rows, columns)
    fits = len(stored) == len(shape) and list(stored[:-2]) == lead and all(stored)
    if not fits or rows % stored[-2] or columns % stored[-1]:
        raise unfit(entries, scales, f"which does not divide {name!r} of shape {list(shape)}")
    return _Grid(rows, columns, rows // stored[-2], columns // stored[-1])


def _slices(name: str, scales: str, grid: _Grid, files: WeightFiles) -> Iterator[Tensor]:
    factors = files.read(scales)
    if factors.dtype == torch.float8_e8m0fnu:
        factors = factors.view(torch.uint8)
    factors = exponents(factors) if factors.dtype == torch.uint8 else factors.float()
    down, across = -(-grid.rows // grid.high), -(-grid.columns // grid.wide)
    count = elements(files.entries[name].shape) // (grid.rows * grid.columns)
    factors = factors.expand(count, down, across) if factors.dim() < 2 else factors
    step = max(1, SLICE_ELEMENTS // grid.columns)
    for index, blocks in enumerate(factors.reshape(count, down, across)):
        for first in range(0, grid.rows, step):
            rows = torch.arange(first, min(first + step, grid.rows)) // grid.high
            begin = (index * grid.rows + first) * grid.columns
            codes = files.read_elements(name, begin, len(rows) * grid.columns)
            values = codes.float().view(len(rows), grid.columns)
            each = blocks[rows].repeat_interleave(grid.wide, 1)[:, : grid.columns]
            yield values.mul_(each)
