"""Large memory that is written for the first time.

The kernel gives memory page by page, when it is first touched; at 4 KiB a page that takes several
times as long as filling it. Where the system has pages of 2 MiB for those who ask, large blocks
ask.
"""

from __future__ import annotations

import contextlib
import mmap

import torch

_LARGE_BYTES = 4 << 20
_PRIVATE = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
_HUGE_PAGES: int | None = getattr(mmap, "MADV_HUGEPAGE", None)


def large_empty(elements: int) -> torch.Tensor:
    """Return a 1-D float32 tensor with undefined values; the system takes it back with the tensor.

    Small ones come from PyTorch's allocator, which is as good for them.
    """
    if 4 * elements < _LARGE_BYTES or _HUGE_PAGES is None:
        return torch.empty(elements)
    block = mmap.mmap(-1, 4 * elements, flags=_PRIVATE)
    with contextlib.suppress(OSError):  # a kernel without huge pages: ordinary ones do
        block.madvise(_HUGE_PAGES)
    return torch.frombuffer(block, dtype=torch.float32)


def large_copy(values: torch.Tensor) -> torch.Tensor:
    """Return a copy of a 1-D float32 tensor in such memory."""
    return large_empty(values.numel()).copy_(values)
