"""Experts in MXFP4 (OCP Microscaling, 2023), as gpt-oss is published.

`X_blocks` `[E, O, I/32, 16]` uint8 has two numbers of 4 bits (e2m1) a byte, the earlier one in the
low half; `X_scales` `[E, O, I/32]` uint8 has each block's exponent plus 127. The modules hold
`X` as `[E, I, O]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

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

_BLOCKS, _SCALES = "_blocks", "_scales"
_BYTES = 16
_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What three bits mean; the fourth is the sign."""


def find(entries: Entries, _: Mapping[str, Any]) -> list[Packed]:
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
        found.append(Packed(stem, (name, scales), wide, partial(_slices, name, scales)))
    return found


def _slices(name: str, scales: str, files: WeightFiles) -> Iterator[Tensor]:
    experts, outputs, count, _ = files.entries[name].shape
    levels = torch.tensor([*_LEVELS, *(-level for level in _LEVELS)])
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
