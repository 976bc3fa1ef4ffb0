"""Host memory: what begins at a page, what waits there during a step, and what is given back.

Pinning memory is slow, goes by whole pages, and a page cannot be pinned twice. So of what is
reused from step to step small buffers are cut from slabs, and large ones have pages of their own.
The C library's heap is told what to do where it can be (glibc).

Where memory has several nodes (sockets, or chips of one), all that an engine holds lies on all of
them in turn, page by page: whichever core updates a range, and whichever link copies it, each node
gives its share. A thread that makes memory would otherwise get it from its own node.

How much this process may take is not physical memory: other programs have some of it, and control
groups may leave it less.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import platform
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atomtrain.engine.devices.device import Device
from atomtrain.planning.plan.disk import PAGE_BYTES, paged
from atomtrain.topology import free_memory_bytes, memory_bytes, memory_nodes
from atomtrain.units import format_bytes

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
    if (tell := _library_call("mallopt")) is None:
        return False
    kept = tell(_M_TRIM_THRESHOLD, _MOST_THRESHOLD), tell(_M_MMAP_THRESHOLD, _MOST_MMAP_BYTES)
    return all(kept)


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
    call = _library_call("syscall")
    return -1 if call is None else call(ctypes.c_long(number), *arguments)


@functools.cache
def _library_call(name: str) -> Callable[..., Any] | None:
    """Return a function of the C library, `None` where it has none of this name."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # Windows has no library `None`
        return getattr(ctypes.CDLL(None), name)  # type: ignore[no-any-return]
    return None


_ROOM_SHARE = 1 / 20
_LEAST_ROOM_BYTES = 512 << 20
_MOST_ROOM_SHARE = 1 / 4
_UNLIMITED_BYTES = 1 << 60
"""Version 1 writes a limit beyond all memory where there is none."""


class HostMemory(NamedTuple):
    """Memory of this host at a moment, in bytes."""

    total_bytes: int
    available_bytes: int
    """What programs can have without swapping, by the kernel's estimate."""
    group_bytes: int | None
    """What the control groups of this process let it take beside what they have; `None`: they have
    no limit."""

    @property
    def usable_bytes(self) -> int:
        """What a model may take: some room is left to all others, and to Python itself."""
        there = self.available_bytes
        if self.group_bytes is not None:
            there = min(there, self.group_bytes)
        room = max(_LEAST_ROOM_BYTES, int(_ROOM_SHARE * there))
        return max(1, there - min(room, int(_MOST_ROOM_SHARE * there)))

    def __str__(self) -> str:
        text = f"{format_bytes(self.available_bytes)} of {format_bytes(self.total_bytes)} free"
        if self.group_bytes is not None and self.group_bytes < self.available_bytes:
            text += f", of which this container may take {format_bytes(self.group_bytes)}"
        return text


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Return the memory of this host now.

    Args:
        root: Where `proc` and `sys` lie; for tests.
    """
    total_bytes, available_bytes = memory_bytes(), free_memory_bytes()
    for line in lines_of(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        if name in ("MemTotal", "MemAvailable"):
            n_bytes = int(rest.split()[0]) << 10
            if name == "MemTotal":
                total_bytes = n_bytes
            else:
                available_bytes = n_bytes
    left = [each for group in _groups(root) if (each := _left_bytes(group)) is not None]
    return HostMemory(total_bytes, available_bytes, min(left, default=None))


def lines_of(path: Path) -> list[str]:
    """Return the lines of a file of the kernel's; none where it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    return []


def _groups(root: Path) -> Iterator[Path]:
    """Yield the folders of the control groups that count this process's memory, each in the next:
    the least limit holds.

    In a container the path may be the host's, of which only the last folder is there, as the root.
    """
    mounted = root / "sys/fs/cgroup"
    for line in lines_of(root / "proc/self/cgroup"):
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        top = mounted / "memory" if controllers else mounted
        inner = PurePosixPath("/" + path.lstrip("/"))
        for group in (inner, *inner.parents):
            yield top / str(group).lstrip("/")


def _left_bytes(group: Path) -> int | None:
    """Return what a control group can still take, `None` where it has no limit."""
    limits = [
        limit
        for name in ("memory.max", "memory.high", "memory.limit_in_bytes")
        if (limit := _number(group / name)) is not None and limit < _UNLIMITED_BYTES
    ]
    if not limits:
        return None
    used = _number(group / "memory.current")
    if used is None:
        used = _number(group / "memory.usage_in_bytes") or 0
    # What was read from files and not touched for long counts as used, and goes when it is needed.
    files = 0
    for line in lines_of(group / "memory.stat"):
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            files = max(files, int(value))
    return max(0, min(limits) - max(0, used - files))


def _number(path: Path) -> int | None:
    for line in lines_of(path):
        if line.strip().isdigit():
            return int(line)
    return None
