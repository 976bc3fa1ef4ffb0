"""Host memory: what begins at a page, what waits there during a step, and what is given back.

Pinning memory is slow, goes by whole pages, and a page cannot be pinned twice. So of what is
reused from step to step small buffers are cut from slabs, and large ones have pages of their own.
The C library's heap is told what to do where it can be (glibc).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from atomtrain.engine.devices.device import Device
from atomtrain.planning.plan.disk import PAGE_BYTES, paged

SLAB_BYTES = 1 << 20
_LARGE_BYTES = SLAB_BYTES // 4
_ALIGNED_BYTES = 512
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MOST_THRESHOLD, _MOST_MMAP_BYTES = 2**31 - 1, 32 << 20
"""What `mallopt` allows."""
_HUGE_BYTES = 4 << 20
_MADV_HUGEPAGE = 14


def aligned_empty(n_bytes: int, empty: Callable[[int], Tensor] | None = None) -> Tensor:
    """Return uint8 memory that begins at a page, as direct I/O needs it.

    Args:
        n_bytes: How much.
        empty: Allocates it, such as `Device.host_empty`; `None` is ordinary memory.
    """
    n_bytes = paged(n_bytes)
    whole = (empty or _ordinary)(n_bytes + PAGE_BYTES)
    start = -whole.data_ptr() % PAGE_BYTES
    memory = whole[start : start + n_bytes]
    if empty is None and n_bytes >= _HUGE_BYTES:
        _ask_for_huge_pages(memory)
    return memory


def _ask_for_huge_pages(memory: Tensor) -> None:
    """Have the kernel serve memory in pages of 2 MiB where it can: there are fewer to pin, to look
    up and to fill with zeros. It is advice, so what comes of it is not asked."""
    if (advise := _library_call("madvise")) is not None:
        address, size = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.numel())
        advise(address, size, _MADV_HUGEPAGE)


def _ordinary(n_bytes: int) -> Tensor:
    return torch.empty(n_bytes, dtype=torch.uint8)


class HostPool:
    """Gives and takes back uint8 buffers from which a device copies fast."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: dict[int, list[Tensor]] = {}
        self._slabs: list[Tensor] = []
        """What is left of each slab: the next small buffer is cut from the first in which it fits,
        since sizes differ by hundreds, and a slab may be left with nearly a quarter."""
        self.total_bytes = 0
        """Bytes of all buffers that were ever needed at once; none is given back."""

    def take(self, n_bytes: int) -> Tensor:
        """Return a uint8 buffer of exactly this size."""
        if free := self._free.get(n_bytes):
            return free.pop()
        self.total_bytes += n_bytes
        if n_bytes > _LARGE_BYTES:
            return self._device.host_empty(n_bytes)
        index = next((i for i, s in enumerate(self._slabs) if s.numel() >= n_bytes), None)
        slab = self._device.host_empty(SLAB_BYTES) if index is None else self._slabs.pop(index)
        rest = slab[-(-n_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES :]
        if rest.numel():
            self._slabs.append(rest)
        return slab[:n_bytes]

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back; nobody may use it any more."""
        self._free.setdefault(buffer.numel(), []).append(buffer)


def keep_freed() -> bool:
    """Have the process keep what it frees, up to 32 MiB at a time, as a GPU's allocator does.

    Otherwise the system takes memory back and fills it with zeros anew, over and over. Returns
    whether the library could be told.
    """
    with contextlib.suppress(OSError, AttributeError):
        tell = ctypes.CDLL(None).mallopt
        kept = tell(_M_TRIM_THRESHOLD, _MOST_THRESHOLD), tell(_M_MMAP_THRESHOLD, _MOST_MMAP_BYTES)
        return all(kept)
    return False


def give_back() -> None:
    """Give all freed memory back to the system now.

    The library does so only with what is free at the heap's end, or was large. Of many tensors that
    went one by one it would keep most.
    """
    if (trim := _library_call("malloc_trim")) is not None:
        trim(0)


@functools.cache
def _library_call(name: str) -> Callable[..., Any] | None:
    """Return a function of the C library, `None` where it has none of this name."""
    with contextlib.suppress(OSError, AttributeError):
        return getattr(ctypes.CDLL(None), name)  # type: ignore[no-any-return]
    return None
