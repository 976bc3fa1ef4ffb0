"""The emulated device: CPU compute behind a link of given bandwidth and a memory budget.

Logic, schedule and accounting are those of a GPU; speed is not. Copies are real and take at least
the time that the link would. Every storage that operations on the computing thread allocate counts
against the budget.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from atomtrain.analysis.costs.storages import StorageTracker, uncounted
from atomtrain.engine.devices.processor_device import ProcessorDevice
from atomtrain.engine.devices.streams import Inject
from atomtrain.errors import DeviceMemoryError
from atomtrain.units import format_bytes

_PIECE_S = 1e-3
"""How long a piece of a large copy keeps the link."""
_LEAST_PIECE_BYTES = 64 << 10


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
