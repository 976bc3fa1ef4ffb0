"""The compiled kernels that fit this processor, and what `kernels/updates.h` declares."""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

import torch
from torch import Tensor

from atomtrain.native.build import HERE, fingerprint, library_path

_LOG = logging.getLogger(__name__)


def core() -> ctypes.CDLL | None:
    """Return the library, or `None` where the PyTorch path has to do; said once in the log.

    Calls release the interpreter's lock.
    """
    return _loaded()


def address(tensor: Tensor | None) -> ctypes.c_void_p | None:
    """Return where a tensor's values begin: what kernels are told, who know no strides."""
    if tensor is None:
        return None
    assert tensor.is_contiguous(), "kernels take contiguous memory only"
    return ctypes.c_void_p(tensor.data_ptr())


@functools.cache
def _loaded() -> ctypes.CDLL | None:
    found, reason = load(HERE)
    if found is None:
        _LOG.warning("updates and codecs run on PyTorch, which is slower: %s", reason)
    return found


def load(folder: Path) -> tuple[ctypes.CDLL | None, str]:
    """Return the library in a folder for this processor, or `None` and why it cannot be used."""
    path = library_path(level(), folder)
    if not path.exists():
        return None, (
            "the compiled core is not installed; with a C compiler, "
            "`python -m atomtrain.native.build` makes it"
        )
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"the compiled core cannot be loaded ({error})"
    sources = library.atom_sources
    sources.restype = ctypes.c_char_p
    if sources().decode() != fingerprint():
        return None, (
            "the compiled core is not of these sources; `python -m atomtrain.native.build` "
            "makes it anew"
        )
    return library, ""


def level() -> str:
    named = torch.backends.cpu.get_cpu_capability()
    return named if named in ("AVX2", "AVX512") else "DEFAULT"


BLOCK = 128
"""Elements that pass at once; ranges begin at multiples of it."""
_float, _int32, _int64, _pointer = ctypes.c_float, ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


class Parameter(ctypes.Structure):
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


class Random(ctypes.Structure):
    _fields_ = (("first", _pointer), ("second", _pointer))


class Slices(ctypes.Structure):
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
