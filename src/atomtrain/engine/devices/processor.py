"""Devices that compute on the processor: the host itself, and one that is emulated behind a link.

Torch's operations are done when they return there. So whatever compute was given is over at once,
and waiting for a stream blocks the thread.

**The host as its own device:** compute and host store share one memory, so nothing is copied. Slots
are the arena itself, and gradients stay where autograd made them until the optimizer has used them.
What is left of the streams is their order: a segment waits for the updates of its blocks. Training
takes the memory of parameters, gradients, optimizer state and one segment's graphs, once each.

**The emulated device:** logic, schedule and accounting are those of a GPU; speed is not. Copies are
real and take at least the time that the link would. Every storage that operations on the computing
thread allocate counts against the budget.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from atomtrain.analysis.costs.storages import StorageTracker, uncounted
from atomtrain.engine.devices.device import AllocatorUse
from atomtrain.engine.devices.host_memory import give_back, keep_freed
from atomtrain.engine.devices.streams import (
    EagerStream,
    Event,
    Inject,
    Record,
    Stream,
    Wait,
    finished,
)
from atomtrain.errors import DeviceMemoryError
from atomtrain.units import format_bytes

_PIECE_S = 1e-3
"""How long a piece of a large copy keeps the link."""
_LEAST_PIECE_BYTES = 64 << 10


class ProcessorDevice:
    """The part of `Device` that does not depend on what the device stands for."""

    name: str
    host_stream: type[Stream] = Stream
    """Of its own streams too: all of them are threads of the host."""
    asked_bytes: int | None = None

    def __init__(self, memory_bytes: int, inject: Inject | None = None) -> None:
        """Plans count against `memory_bytes`; `inject` runs before each job of each stream."""
        self.torch_device = torch.device("cpu")
        self.inject = inject
        self.generator = torch.default_generator
        self.memory_bytes = memory_bytes
        self.reserved_bytes = 0
        self.load = self.host_stream("load", inject)
        self.fetch = self.host_stream("fetch", inject)
        self.unload = self.host_stream("unload", inject)
        self.save = self.host_stream("save", inject)
        self._wait = Wait(inject)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def mark(self) -> Event:
        return finished()

    def hold(self, event: Event) -> None:
        self._wait.hold(event)

    def new_record(self) -> Record:
        return Record()

    def synchronize(self) -> None:
        pass

    def trim(self) -> None:
        pass

    def take_wait_s(self) -> float:
        return self._wait.take_s()

    def peak_bytes(self) -> int:
        raise NotImplementedError

    def allocator_use(self) -> AllocatorUse:
        return AllocatorUse(self.peak_bytes(), self.peak_bytes(), 0)

    def close(self) -> None:
        for stream in (self.load, self.fetch, self.unload, self.save):
            stream.close()


class HostDevice(ProcessorDevice):
    """A `Device` that is the host: its budget is for plans only, and its peak is 0."""

    name = "cpu"
    one_memory = True
    host_stream: type[Stream] = EagerStream

    def __init__(self, memory_bytes: int, inject: Inject | None = None) -> None:
        """Plans count against `memory_bytes`; `inject` runs before each job of each stream."""
        super().__init__(memory_bytes, inject)
        keep_freed()  # or each step would get its activations' pages anew, filled with zeros

    def computing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def on_host(self) -> AbstractContextManager[None]:
        return nullcontext()

    def host_empty(self, n_bytes: int) -> Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8)

    def copy_in(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def copy_out(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def reset_peak(self) -> None:
        pass

    def peak_bytes(self) -> int:
        return 0

    def close(self) -> None:
        super().close()
        give_back()


class _Link:
    """One direction of the link: a copy ends no sooner than the bandwidth allows."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0
        self._lock = threading.Lock()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy a segment in pieces, so that a value that is wanted at once need not wait for it."""
        asked_s = time.perf_counter()
        most = max(_LEAST_PIECE_BYTES, int(_PIECE_S * self._bytes_per_s))
        if source.dim() != 1 or source.nbytes <= most:
            self._copy(target, source, asked_s)
            return
        elements = most // source.element_size()
        for to, of in zip(target.split(elements), source.split(elements), strict=True):
            # A link goes on by itself: that this thread slept too long does not slow it down.
            asked_s = self._copy(to, of, asked_s)

    def _copy(self, target: Tensor, source: Tensor, asked_s: float) -> float:
        """Copy, then sleep for what remains of the time that the link would need.

        Returns when the link is done; it began no sooner than the copy was asked for.
        """
        with self._lock:
            self._free_s = max(asked_s, self._free_s)
            self._free_s += source.nbytes / self._bytes_per_s
            ends_s = self._free_s
        if source.is_contiguous() and target.is_contiguous() and source.dtype is target.dtype:
            # On this thread alone: a copy of torch's would wake a team of threads, which would
            # take the cores from those that compute.
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
        else:
            target.copy_(source)
        remaining_s = ends_s - time.perf_counter()
        if remaining_s > 0:
            time.sleep(remaining_s)
        return ends_s


class EmulatedDevice(ProcessorDevice):
    """A `Device` on the CPU behind a link."""

    name = "emulated"
    one_memory = False

    def __init__(
        self, memory_bytes: int, link_bytes_per_s: float, inject: Inject | None = None
    ) -> None:
        """Both directions of the link have `link_bytes_per_s`; `inject` runs before each job."""
        super().__init__(memory_bytes, inject)
        self.link_bytes_per_s = link_bytes_per_s
        self._down, self._up = _Link(link_bytes_per_s), _Link(link_bytes_per_s)
        self._tracker = StorageTracker(self._check)

    def _check(self, live_bytes: int, new_bytes: int, operation: str) -> None:
        if live_bytes > self.memory_bytes:
            raise DeviceMemoryError(
                f"the device budget of {format_bytes(self.memory_bytes)} is exceeded: "
                f"{operation} allocated {format_bytes(new_bytes)} and "
                f"{format_bytes(live_bytes)} are in use; raise --device-memory or use smaller "
                "micro-batches"
            )

    @contextmanager
    def computing(self) -> Iterator[None]:
        with self._tracker:
            yield

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with uncounted():
            tensor = torch.empty(shape, dtype=dtype)
        self._tracker.adopt(tensor, "empty")
        return tensor

    def on_host(self) -> AbstractContextManager[None]:
        return self._tracker.ignoring()

    def host_empty(self, n_bytes: int) -> Tensor:
        with self._tracker.ignoring():
            return torch.empty(n_bytes, dtype=torch.uint8)

    def copy_in(self, target: Tensor, source: Tensor) -> None:
        self._down.copy(target, source)

    def copy_out(self, target: Tensor, source: Tensor) -> None:
        self._up.copy(target, source)

    def reset_peak(self) -> None:
        self._tracker.reset_peak()

    def peak_bytes(self) -> int:
        return self._tracker.peak_bytes
