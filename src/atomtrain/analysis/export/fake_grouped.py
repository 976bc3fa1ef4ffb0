"""Matrix products of groups of rows (mixtures of experts) on tensors without data, in any type.

torch's own rule for them knows bfloat16 only, although they run in other types too. Without this
one a model in float32 could only be traced on the path that its code takes when it is traced, whose
bits are not those of the path that it takes when it runs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensorMode

_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_ROW_BYTES = 16
"""Rows begin at multiples of it, those of the result too."""


def _fake_grouped_mm(
    mode: FakeTensorMode,
    operation: object,
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return what the operation returns but for the data; refuse what it refuses."""
    for matrix in (left, right):
        if matrix.dtype not in _TYPES:
            raise RuntimeError(f"grouped_mm does not take {matrix.dtype}")
        if max(matrix.stride()[-2:]) * matrix.element_size() % _ROW_BYTES:
            raise RuntimeError("grouped_mm takes only rows at multiples of 16 bytes")
    rows, columns = left.shape[-2], right.shape[-1]
    dtype = out_dtype or left.dtype
    each = _ROW_BYTES // dtype.itemsize
    width = -(-columns // each) * each
    if left.dim() != right.dim():  # one of them holds the groups of the other's rows
        return left.new_empty_strided((rows, columns), (width, 1), dtype=dtype)
    groups = left.shape[0] if offs is None else offs.shape[0]
    shape = groups, rows, columns
    return left.new_empty_strided(shape, (rows * width, width, 1), dtype=dtype)


if hasattr(torch.ops.aten, "_grouped_mm"):
    op_implementations_dict.setdefault(torch.ops.aten._grouped_mm.default, _fake_grouped_mm)
