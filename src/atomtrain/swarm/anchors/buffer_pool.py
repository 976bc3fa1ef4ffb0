"""Large memory that is used again and again.

The kernel gives memory page by page, when it is first touched; at 4 KiB a page that takes several
times as long as filling it, and even in pages of 2 MiB, for which large blocks ask where the system
has them, it has to be cleared. Rounds need the same sizes each time: what one has left serves the
next. No more is kept than has been in use at the same time.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref

import numpy as np
import torch

_SMALL_BYTES, _LARGE_BYTES = 256 << 10, 4 << 20
_UNIT_BYTES = 64 << 10
_PRIVATE = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
_HUGE_PAGES: int | None = getattr(mmap, "MADV_HUGEPAGE", None)


class BufferPool:
    """Hands out memory, and takes it back by itself when nothing refers to it any more.

    May be used by several threads.
    """

    def __init__(self, *, one_size: bool = False) -> None:
        """Start with nothing; with `one_size` other sizes than the last are not kept."""
        self._one_size = one_size
        self._free: dict[int, list[mmap.mmap]] = {}  # by size; changed by atomic operations only

    def empty(self, size_bytes: int) -> torch.Tensor:
        """Return a 1-D uint8 tensor with undefined values.

        Small ones come from PyTorch's allocator, which is as good for them.
        """
        if size_bytes < _SMALL_BYTES or not _PRIVATE:
            return torch.empty(size_bytes, dtype=torch.uint8)
        whole_bytes = -(-size_bytes // _UNIT_BYTES) * _UNIT_BYTES
        try:
            block = self._free.get(whole_bytes, []).pop()
        except IndexError:
            block = self._new(whole_bytes)
        values = np.frombuffer(block, np.uint8)
        # Views of the tensor, and arrays and memoryviews of those, all refer to `values`.
        weakref.finalize(values, self._take_back, block).atexit = False
        return torch.from_numpy(values)[:size_bytes]

    @property
    def kept_bytes(self) -> int:
        """Bytes that nobody uses now."""
        return sum(size * len(blocks) for size, blocks in list(self._free.items()))

    def _new(self, size_bytes: int) -> mmap.mmap:
        if self._one_size:
            self._free = {}
        block = mmap.mmap(-1, size_bytes, flags=_PRIVATE)
        if _HUGE_PAGES is not None:
            with contextlib.suppress(OSError):  # a kernel without huge pages: ordinary ones do
                block.madvise(_HUGE_PAGES)
        return block

    def _take_back(self, block: mmap.mmap) -> None:
        # Without a lock: it may be called in the midst of `empty`, by whatever frees objects there.
        self._free.setdefault(len(block), []).append(block)


_LARGE = BufferPool(one_size=True)
_SLICES: tuple[object, BufferPool] = (None, BufferPool())
"""What the last exchange has left, and which kind of exchange it was."""


def pooled_empty(elements: int) -> torch.Tensor:
    """Return a 1-D float32 tensor with undefined values; small ones are PyTorch's."""
    if 4 * elements < _LARGE_BYTES:
        return torch.empty(elements)
    return _LARGE.empty(4 * elements).view(torch.float32)


def pooled_copy(values: torch.Tensor) -> torch.Tensor:
    """Return a copy of a 1-D float32 tensor in such memory."""
    return pooled_empty(values.numel()).copy_(values)


def exchange_memory(kind: object) -> BufferPool:
    """Return memory for the slices of an exchange: what the last one has left, if it was alike."""
    global _SLICES  # noqa: PLW0603 - replaced as a whole
    if _SLICES[0] != kind:
        _SLICES = (kind, BufferPool())
    return _SLICES[1]
