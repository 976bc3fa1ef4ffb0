"""Norms of gradients on the host: compiled, a parameter on each thread, with the bits of PyTorch.

`torch.linalg.vector_norm` defines them: one thread adds squares in float32 and in one order, so no
number of threads changes a bit. The compiled kernel keeps that order, and reads 16 bits without a
float32 copy. Before it is used for a type, it is tried beside PyTorch, as updates are.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from atomtrain.native import library
from atomtrain.native.library import GRADIENTS, address

_LOG = logging.getLogger(__name__)
_SPIKE = 4096.0
"""Beside its square, float32 loses a square of 1: which sums it is in tells their order."""
_SPIKED = 1 << 21 | 13
_ENDS = 24
"""Sizes beside these differ in what fills no step of the kernel."""


def norms(gradients: Sequence[Tensor], *, wide: bool) -> list[Tensor]:
    """Return the Euclidean norm of each gradient, a scalar on the CPU.

    Args:
        gradients: On the CPU, of float32, bfloat16 or float16.
        wide: Take them as float32; else each norm is rounded to its gradient's type.
    """
    core = library.core()
    found = [torch.empty((), dtype=torch.float32) for _ in gradients]

    def take(index: int) -> None:
        gradient = gradients[index]
        # A single element's norm is its magnitude, not the root of its square.
        plain = gradient.is_contiguous() and gradient.numel() > 1
        if core is not None and plain and equal(gradient.dtype, wide):
            _compiled(core, gradient, wide, found[index])
            found[index] = found[index] if wide else found[index].to(gradient.dtype)
        else:
            found[index] = torch_norm(gradient, wide)

    def hand(indices: Sequence[int]) -> None:
        for index in indices:
            take(index)

    hands = library.dealt([gradient.numel() for gradient in gradients], library.threads())
    library.share([functools.partial(hand, indices) for indices in hands])
    return found


def torch_norm(gradient: Tensor, wide: bool) -> Tensor:
    """Return the norm that defines the bits."""
    norm: Tensor = torch.linalg.vector_norm(gradient.float() if wide else gradient, 2.0)
    return norm


def _compiled(core: ctypes.CDLL, gradient: Tensor, wide: bool, out: Tensor) -> None:
    """Write the norm of a contiguous gradient to a float32 scalar, not rounded."""
    core.atom_norm(
        address(gradient), ctypes.c_int64(gradient.numel()),
        ctypes.c_int32(GRADIENTS[gradient.dtype]), ctypes.c_int32(wide), address(out),
    )  # fmt: skip


@functools.cache
def equal(dtype: torch.dtype, wide: bool) -> bool:
    """Return whether the compiled kernel takes gradients of a type, and gives PyTorch's bits."""
    core = library.core()
    # PyTorch's threads share a float16 sum, so its bits depend on their number.
    if core is None or dtype not in GRADIENTS or (dtype is torch.float16 and not wide):
        return False
    out = torch.empty((), dtype=torch.float32)
    for gradient in _tried(dtype):
        _compiled(core, gradient, wide, out)
        expected = torch_norm(gradient, wide)
        if not torch.equal(out.to(expected.dtype), expected):
            _LOG.warning(
                "norms of %s gradients are PyTorch's, which is slower: the compiled core gives "
                "other bits than this PyTorch (%s)", dtype, torch.__version__,
            )  # fmt: skip
            return False
    return True


def _tried(dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield gradients on which another order of sums, or another rounding, shows."""
    drawn = torch.Generator().manual_seed(1)
    for size in [base + more for base in (2, 1000) for more in range(_ENDS)] * 4:
        yield torch.randn(size, generator=drawn).to(dtype)
    for at in (0, 13, _SPIKED - 20, _SPIKED - 1):
        spiked = torch.ones(_SPIKED, dtype=dtype)
        spiked[at] = _SPIKE
        yield spiked
