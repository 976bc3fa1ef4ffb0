"""Loads the compiled kernels that fit this processor, or says why there are none."""

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
    """Return the level of this processor; levels are named as PyTorch names them."""
    named = torch.backends.cpu.get_cpu_capability()
    return named if named in ("AVX2", "AVX512") else "DEFAULT"
