"""Copies between host and device, and pinned memory.

| host memory | `non_blocking` | host to device | device to host |
|---|---|---|---|
| pinned | yes | the source is read when the copy runs | written when it runs |
| pinned | no | the same, and the host waits for the stream | the same, and waits |
| ordinary | either | the stream is waited for, then the source is read | the host waits |

As in PyTorch, a copy that converts or changes the layout goes through ordinary memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tests.support.software_gpu.memory import raw_of
from tests.support.software_gpu.order import NotEmulatedError, Scheduler
from tests.support.software_gpu.races import Accesses, Range
from tests.support.software_gpu.tensors import GpuTensor, note

if TYPE_CHECKING:
    from tests.support.software_gpu.runtime import SoftwareGpus


class Pinned:
    """The host memory that is pinned, by address."""

    def __init__(self, scheduler: Scheduler, report: Callable[[str], None]) -> None:
        self._scheduler, self._report = scheduler, report
        self.ranges: dict[int, int] = {}
        self.most_bytes: int | None = None
        """What the system allows to be pinned; `None` is all."""
        self.last_error = 0
        """Stays until somebody asks for it."""
        self._accesses: dict[int, Accesses] = {}

    def register(self, address: int, n_bytes: int) -> int:
        """Pin; return an error code of CUDA."""
        if any(a < address + n_bytes and address < a + n for a, n in self.ranges.items()):
            self.last_error = 712  # cudaErrorHostMemoryAlreadyRegistered
            return self.last_error
        if self.most_bytes is not None and sum(self.ranges.values()) + n_bytes > self.most_bytes:
            self.last_error = 2  # cudaErrorMemoryAllocation
            return self.last_error
        self.ranges[address] = n_bytes
        self._accesses[address] = Accesses(f"{n_bytes} pinned bytes", self._report)
        return 0

    def unregister(self, address: int) -> int:
        """Unpin; what is still under way is reported, and finished."""
        if address not in self.ranges:
            return 713  # cudaErrorHostMemoryNotRegistered
        n_bytes = self.ranges[address]
        if self._scheduler.finish_host(address, address + n_bytes):
            self._report(f"{n_bytes} bytes of host memory were unpinned with copies under way")
        del self.ranges[address], self._accesses[address]
        return 0

    def accesses_of(self, tensor: Tensor) -> Accesses | None:
        """Return those of the pinned memory in which a tensor lies; `None` if it is ordinary.

        Raises:
            RuntimeError: it lies in more than one range, or in part in one.
        """
        low, high = addresses_of(tensor)
        for address, n_bytes in self.ranges.items():
            if address <= low and high <= address + n_bytes:
                return self._accesses[address]
            if low < address + n_bytes and address < high:
                raise RuntimeError("CUDA error: invalid argument; memory pinned only in part")
        return None


def addresses_of(tensor: Tensor) -> Range:
    """Return the addresses that a dense tensor of the host takes."""
    low = tensor.data_ptr()
    return Range(low, low + tensor.nbytes)


def copy(gpus: SoftwareGpus, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy within a GPU, or between host and GPU."""
    if target.numel() == 0:
        return target
    if not isinstance(source, GpuTensor):
        _to_device(gpus, target, source, non_blocking)
    elif not isinstance(target, GpuTensor):
        _to_host(gpus, target, source, non_blocking)
    elif target._gpu != source._gpu:
        raise NotEmulatedError(f"a copy from {source._gpu} to {target._gpu}")
    else:
        to, of = _raw(gpus, target), _raw(gpus, source)
        task = gpus.scheduler.submit(gpus.queue_of(target._gpu), lambda: _copy(to, of))
        note(gpus, task, "copy", read=[source], written=[target])
    return target


def _to_device(gpus: SoftwareGpus, target: Any, source: Tensor, non_blocking: bool) -> None:
    queue, to = gpus.queue_of(target._gpu), _raw(gpus, target)
    accesses = gpus.pinned.accesses_of(source) if _is_plain(target, source) else None
    if accesses is None:
        gpus.scheduler.finish(queue.last)
        taken = source.clone()
        task = gpus.scheduler.submit(queue, lambda: _copy(to, taken))
    else:
        # By address: a copy does not keep its source alive.
        place, of = addresses_of(source), _by_address(source)
        task = gpus.scheduler.submit(queue, lambda: _copy(to, of), host=place)
        accesses.note(task, place, "a copy to the device", writes=False)
    note(gpus, task, "a copy to the device", read=[], written=[target])
    if not non_blocking:
        gpus.scheduler.finish(task)


def _to_host(gpus: SoftwareGpus, target: Tensor, source: Any, non_blocking: bool) -> None:
    queue, of = gpus.queue_of(source._gpu), _raw(gpus, source)
    accesses = gpus.pinned.accesses_of(target) if _is_plain(target, source) else None
    if accesses is None:
        task = gpus.scheduler.submit(queue, lambda: _copy(target, of))
    else:
        place, to = addresses_of(target), _by_address(target)
        task = gpus.scheduler.submit(queue, lambda: _copy(to, of), host=place)
        accesses.note(task, place, "a copy to the host", writes=True)
    note(gpus, task, "a copy to the host", read=[source], written=[])
    if accesses is None or not non_blocking:
        gpus.scheduler.finish(task)


def _is_plain(target: Tensor, source: Tensor) -> bool:
    """Return whether a copy is one of bytes: the same type, the same dense layout."""
    same = target.dtype == source.dtype and target.size() == source.size()
    return same and target.stride() == source.stride() and _is_dense(target)


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _raw(gpus: SoftwareGpus, tensor: Tensor) -> Tensor:
    return raw_of(gpus.blocks.of(tensor).data, tensor)


def _by_address(tensor: Tensor) -> Tensor:
    """Return the same memory of the host, without holding it."""
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    raw = torch.empty(0, dtype=tensor.dtype)
    return raw.set_(flat.untyped_storage(), 0, tensor.size(), tensor.stride())


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
