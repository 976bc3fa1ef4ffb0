"""What `kernels/updates.h` declares, for Python."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from atomtrain.native import pool

BLOCK = 128
"""Elements that pass at once; ranges begin at multiples of it."""
_float, _int32, _int64, _pointer = ctypes.c_float, ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


class Parameter(ctypes.Structure):
    """A parameter in memory, and what belongs to it."""

    _fields_ = (
        ("count", _int64),
        *((name, _int32) for name in ("values_kind", "gradient_kind", "moments_kind", "clipped")),
        *((name, _float) for name in ("coefficient", "factor")),
        *((name, _pointer) for name in ("values", "master", "gradient", "first", "second")),
        *((name, _pointer) for name in ("first_scale", "second_scale")),
    )


class AdamWNumbers(ctypes.Structure):
    """What AdamW multiplies by in one step."""

    _fields_ = tuple(
        (name, _float)
        for name in ("keep", "weight1", "beta2", "weight2", "root_correction", "eps", "step")
    )


class SGDNumbers(ctypes.Structure):
    """What SGD multiplies by in one step."""

    _fields_ = (
        *((name, _float) for name in ("lr", "weight_decay", "momentum", "share")),
        *((name, _int32) for name in ("nesterov", "first_step")),
    )


class _Random(ctypes.Structure):
    _fields_ = (("first", _pointer), ("second", _pointer))


class _Slices(ctypes.Structure):
    _fields_ = (("elements", _int64), ("random", _pointer))


VALUES = {
    (torch.float32, "float32"): 0,
    (torch.bfloat16, "float32"): 1,
    (torch.bfloat16, "split"): 2,
    (torch.float16, "float32"): 3,
}
"""Kinds of parameters, by their type and the format of the master."""
GRADIENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MOMENTS = {"float32": 0, "bfloat16": 1, "int8": 2}


def run_adamw(
    core: ctypes.CDLL,
    parameter: Parameter,
    numbers: AdamWNumbers,
    slice_elements: int,
    table: Tensor | None,
    starts: Sequence[tuple[int, int]],
) -> None:
    """Update a parameter by AdamW.

    Args:
        core: The library.
        parameter: Its memory must stay until this returns.
        numbers: Of this step.
        slice_elements: A multiple of `BLOCK`.
        table: Random numbers, int16; `None` if nothing is rounded at random.
        starts: Where those of both moments begin, for each slice.
    """
    base = 0 if table is None else table.data_ptr()
    random = (_Random * len(starts))(
        *(_Random(base + 2 * one, base + 2 * two) for one, two in starts)
    )
    slices = _Slices(slice_elements, ctypes.addressof(random))

    def update(begin: int, end: int) -> None:
        core.atom_adamw(
            ctypes.byref(parameter), ctypes.byref(numbers), ctypes.byref(slices),
            _int64(begin), _int64(end),
        )  # fmt: skip

    pool.run(update, parameter.count, BLOCK)


def run_sgd(core: ctypes.CDLL, parameter: Parameter, numbers: SGDNumbers) -> None:
    """Update a parameter by SGD; the momentum, if there is one, is its first moment."""

    def update(begin: int, end: int) -> None:
        core.atom_sgd(
            ctypes.byref(parameter), ctypes.byref(numbers), _int64(begin), _int64(end)
        )  # fmt: skip

    pool.run(update, parameter.count, BLOCK)
