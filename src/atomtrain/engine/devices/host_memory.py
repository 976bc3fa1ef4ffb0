"""Host memory: what begins at a page, what waits there during a step, and what is given back.

Pinning memory is slow, goes by whole pages, and a page cannot be pinned twice. So of what is
reused from step to step small buffers are cut from slabs, and large ones have pages of their own.
The C library's heap is told what to do where it can be (glibc).

Where memory has several nodes (sockets, or chips of one), all that an engine holds lies on all of
them in turn, page by page: whichever core updates a range, and whichever link copies it, each node
gives its share. A thread that makes memory would otherwise get it from its own node.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import platform
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from atomtrain.engine.devices.device import Device
from atomtrain.planning.plan.disk import PAGE_BYTES, paged
from atomtrain.topology import memory_nodes

SLAB_BYTES = 1 << 20
_LARGE_BYTES = SLAB_BYTES // 4
_ALIGNED_BYTES = 512
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MOST_THRESHOLD, _MOST_MMAP_BYTES = 2**31 - 1, 32 << 20
"""What `mallopt` allows."""
_SYSTEM_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
"""Numbers of `set_mempolicy` and `get_mempolicy`, which the C library does not wrap."""
_DEFAULT, _INTERLEAVE = 0, 3
"""Policies of `set_mempolicy(2)`."""
_MOST_NODES = 1024
_MASK_BITS = 64
_LOG = logging.getLogger(__name__)
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


@contextlib.contextmanager
def interleaved(nodes: Sequence[int] | None = None) -> Iterator[None]:
    """Have the memory that this thread touches first lie on all nodes in turn, page by page.

    So does that of threads which are started meanwhile, for good. With one node, and under a policy
    of the user's own (`numactl`), nothing is changed.

    Args:
        nodes: Numbers of the nodes; `None` is all that the process may use.
    """
    nodes = memory_nodes() if nodes is None else nodes
    changed = len(nodes) > 1 and _policy() == _DEFAULT and _set_policy(_INTERLEAVE, nodes)
    if len(nodes) > 1 and not changed:
        _LOG.info("memory stays on the nodes that the system chooses, of %d", len(nodes))
    try:
        yield
    finally:
        if changed:
            _set_policy(_DEFAULT, ())


def _policy() -> int | None:
    """Return the calling thread's memory policy; `None` if it cannot be known."""
    calls, mode = _SYSTEM_CALLS.get(platform.machine()), ctypes.c_int()
    nothing = (None, ctypes.c_ulong(0), None, ctypes.c_ulong(0))
    if calls is None or _system_call(calls[1], ctypes.byref(mode), *nothing) != 0:
        return None
    return mode.value


def _set_policy(mode: int, nodes: Sequence[int]) -> bool:
    """Set the calling thread's memory policy; return whether the system let it."""
    calls = _SYSTEM_CALLS.get(platform.machine())
    if calls is None:
        return False
    mask = (ctypes.c_uint64 * (_MOST_NODES // _MASK_BITS))()
    for node in nodes:
        mask[node // _MASK_BITS] |= 1 << node % _MASK_BITS
    # The kernel takes one bit less than it is told.
    place, bits = (mask, _MOST_NODES + 1) if nodes else (None, 0)
    return bool(_system_call(calls[0], ctypes.c_int(mode), place, ctypes.c_ulong(bits)) == 0)


def _system_call(number: int, *arguments: Any) -> Any:
    with contextlib.suppress(OSError, AttributeError):
        return ctypes.CDLL(None).syscall(ctypes.c_long(number), *arguments)
    return -1


@functools.cache
def _library_call(name: str) -> Callable[..., Any] | None:
    """Return a function of the C library, `None` where it has none of this name."""
    with contextlib.suppress(OSError, AttributeError):
        return getattr(ctypes.CDLL(None), name)  # type: ignore[no-any-return]
    return None
