"""Weights in floating point of 8 or 4 bits with scales: FP8 of DeepSeek-V3 and others, and MXFP4.

FP8: `X.weight` is e4m3 or e5m2 `[..., O, I]`, `X.weight_scale_inv` has what each block is
multiplied by (https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/README_WEIGHTS.md). The last
block of a row or a column may be smaller. Without `weight_block_size` the scales are of equal
blocks: one, or one a row. Scales of activations are not used: activations stay wide.

MXFP4 (OCP Microscaling, 2023), as gpt-oss is published: `X_blocks` `[E, O, I/32, 16]` uint8 has two
numbers of 4 bits (e2m1) a byte, the earlier one in the low half; `X_scales` `[E, O, I/32]` uint8
has each block's exponent plus 127. The modules hold `X` as `[E, I, O]`.
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
    part_of,
    unfit,
)
from atomtrain.models.quantised import E2M1, exponents
from atomtrain.models.weights.files import WeightFiles

_CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALE_TYPES = (
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


def find_fp8(entries: Entries, settings: Mapping[str, Any]) -> list[Packed]:
    """Return the weights that are stored in 8 bits.

    Raises:
        DataError: one lacks its scales, or these are of another shape or type.
    """
    found = []
    for name, entry in entries.items():
        if entry.dtype not in _CODES:
            continue
        scales = part_of(entries, name, _names_of_scales(name))
        check_part(entries, scales, dtypes=_SCALE_TYPES, codes=name)
        grid = _grid(entries, name, scales, settings.get("weight_block_size"))
        slices = partial(_fp8_slices, name, scales, grid)
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


def _fp8_slices(name: str, scales: str, grid: _Grid, files: WeightFiles) -> Iterator[Tensor]:
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


_BLOCKS, _SCALES = "_blocks", "_scales"
_BYTES = 16


def find_mxfp4(entries: Entries, _: Mapping[str, Any]) -> list[Packed]:
    """Return the weights that are stored in MXFP4.

    Raises:
        DataError: one lacks its blocks or scales, or these are of another shape or type.
    """
    found = []
    for name in entries:
        if name.endswith(_SCALES):
            part_of(entries, name, [name.removesuffix(_SCALES) + _BLOCKS])
        if not name.endswith(_BLOCKS):
            continue
        stem = name.removesuffix(_BLOCKS)
        scales = part_of(entries, name, [stem + _SCALES])
        shape = entries[name].shape
        if len(shape) != 4 or shape[-1] != _BYTES or not elements(shape):
            raise unfit(entries, name, f"not [experts, outputs, blocks, {_BYTES}]")
        check_part(entries, name, dtypes=[torch.uint8])
        check_part(entries, scales, shape[:-1], [torch.uint8], codes=name)
        wide = (shape[0], shape[2] * _BYTES * 2, shape[1])
        found.append(Packed(stem, (name, scales), wide, partial(_mxfp4_slices, name, scales)))
    return found


def _mxfp4_slices(name: str, scales: str, files: WeightFiles) -> Iterator[Tensor]:
    experts, outputs, count, _ = files.entries[name].shape
    levels = torch.tensor(E2M1)
    step = max(1, SLICE_ELEMENTS // (count * _BYTES * 2))
    for expert in range(experts):
        wide = torch.empty(count * _BYTES * 2, outputs)
        for first in range(0, outputs, step):
            rows = min(step, outputs - first)
            begin = (expert * outputs + first) * count
            codes = files.read_elements(name, begin * _BYTES, rows * count * _BYTES)
            factors = exponents(files.read_elements(scales, begin, rows * count))
            halves = torch.stack((codes & 15, codes >> 4), -1).view(rows * count, -1)
            values = levels[halves.int()].mul_(factors[:, None])
            wide[:, first : first + rows] = values.view(rows, -1).T
        yield wide
