"""A GPU as a device: one of its streams per direction and purpose, ordered by events.

Each stream's thread only enqueues; what must be finished before a copy is expressed as
`wait_event` on the GPU's stream. Events of host work (optimizer updates) block the thread instead,
so a copy is never enqueued before the host data are final.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from atomtrain.analysis.costs.storages import is_dense
from atomtrain.engine.devices.device import AllocatorUse
from atomtrain.engine.devices.gpus import CAPS, budget_of, require_gpu, split_of
from atomtrain.engine.devices.host_memory import aligned_empty
from atomtrain.engine.devices.pinning import PINS, Part, StagingRing
from atomtrain.engine.devices.streams import Event, Inject, Job, Record, Stream
from atomtrain.engine.devices.vendor import Vendor
from atomtrain.errors import DeviceMemoryError
from atomtrain.units import format_bytes

_PIECE_BYTES = 32 << 20
"""About a millisecond of the link. A copy engine serves streams in turns, copy by copy."""


class _GpuEvent(Event):
    """Finished when the work is enqueued; `wait` and `order` then go by the GPU's event."""

    def __init__(self, vendor: Vendor) -> None:
        super().__init__()
        # A thread that waits for it sleeps: host updates want the core.
        self.recorded = vendor.event()
        self.held_by: GpuDevice | None = None
        """Whose compute goes on only after it."""

    def wait(self) -> None:
        super().wait()
        self.recorded.synchronize()

    def is_done(self) -> bool:
        return super().is_done() and bool(self.recorded.query())

    def order(self, stream: Any) -> None:
        """Let `stream` go on only after the work; blocks until the work is enqueued."""
        super().wait()
        stream.wait_event(self.recorded)


class _Wait:
    """Times one wait of compute."""

    def __init__(self, vendor: Vendor) -> None:
        self.before, self.after = (vendor.event(timed=True) for _ in range(2))


class _GpuRecord(Record):
    """Times device work by the GPU's events; host updates on the host, from the same zero."""

    def __init__(self, vendor: Vendor, compute: Any) -> None:
        super().__init__()
        self._vendor = vendor
        compute.synchronize()
        self._zero_s = time.perf_counter()
        self._zero = vendor.event(timed=True)
        self._zero.record(compute)

    def device_now(self) -> Any:
        moment = self._vendor.event(timed=True)
        moment.record()
        return moment

    def _seconds(self, moment: Any) -> float:
        if isinstance(moment, float):  # of the host
            return super()._seconds(moment)
        moment.synchronize()
        return self._zero_s + float(self._zero.elapsed_time(moment)) / 1e3


class _GpuStream(Stream):
    """Enqueues jobs on a stream of the GPU."""

    def __init__(
        self, name: str, vendor: Vendor, device: torch.device, inject: Inject | None
    ) -> None:
        self._vendor, self._api, self._device = vendor, vendor.api, device
        self._queue = vendor.api.Stream(device)
        super().__init__(name, inject)

    def _new_event(self) -> Event:
        return _GpuEvent(self._vendor)

    def _now(self, record: Record) -> Any:
        return record.device_now()

    def _run(self, job: Job, after: Sequence[Event], event: Event) -> None:
        assert isinstance(event, _GpuEvent)
        with self._api.device(self._device), self._api.stream(self._queue):
            for earlier in after:
                _order(earlier, self._queue)
            if self._inject is not None:
                self._inject(self.name)
            job()
            event.recorded.record(self._queue)


def _order(event: Event, stream: Any) -> None:
    if isinstance(event, _GpuEvent):
        event.order(stream)
    else:
        event.wait()


class GpuDevice:
    """A `Device` on a GPU, its memory capped at the budget."""

    one_memory = False
    host_stream: type[Stream] = Stream
    asked_bytes: int | None = None
    load: Stream
    fetch: Stream
    unload: Stream
    save: Stream

    def __init__(
        self,
        vendor: Vendor,
        index: int,
        memory_bytes: int | None = None,
        inject: Inject | None = None,
    ) -> None:
        """Use GPU `index` of a maker; `memory_bytes` of `None` allows 90% of what is free now.

        Raises:
            ConfigError: there is no such GPU, less of its memory is free than the budget, or torch
                is too old for it.
        """
        require_gpu(vendor, index)
        vendor.prepare()
        self.vendor, self.inject = vendor, inject
        self._api = vendor.api
        self.torch_device = torch.device(vendor.kind, index)
        self.name = str(self._api.get_device_name(index))
        self.memory_bytes = budget_of(vendor, index, memory_bytes)
        _, total_bytes = self._api.mem_get_info(index)
        self.reserved_bytes, self._cap_bytes = split_of(
            self.memory_bytes, total_bytes, vendor.library_bytes()
        )
        self._api.init()
        self.generator = self._api.default_generators[index]
        self.load, self.fetch, self.unload, self.save = (
            _GpuStream(name, vendor, self.torch_device, inject)
            for name in ("load", "fetch", "unload", "save")
        )
        self._waits: list[_Wait] = []
        self._waited: list[_Wait] = []
        """Events of earlier steps, to be used again: making one takes longer than recording it."""
        self._retries = 0
        self._staging = _Staging(vendor)
        self._compute = self._api.current_stream(self.torch_device)
        self._closed = False
        CAPS[vendor.kind].add(index, self._cap_bytes)

    @contextmanager
    def computing(self) -> Iterator[None]:
        try:
            with self._api.device(self.torch_device), self._api.stream(self._compute):
                yield
        except torch.OutOfMemoryError as error:
            reason = str(error).partition("\n")[0]
            raise DeviceMemoryError(
                f"the device budget of {format_bytes(self.memory_bytes)} is exceeded, or others "
                f"use {self.name} too ({reason}); raise --device-memory or use smaller "
                "micro-batches"
            ) from error

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.torch_device)

    def on_host(self) -> AbstractContextManager[None]:
        return nullcontext()

    def host_empty(self, n_bytes: int) -> Tensor:
        """Allocate ordinary memory and pin it in place, in pages of its own.

        PyTorch's pinned allocator rounds up to powers of two (pytorch#95823), which would nearly
        double the host memory of a large model. What the system does not allow to be pinned stays
        ordinary memory, with a warning.
        """
        if n_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        tensor = aligned_empty(n_bytes)[:n_bytes]
        PINS.pin(tensor, self.vendor)
        return tensor

    def copy_in(self, target: Tensor, source: Tensor) -> None:
        _copy(target, source, PINS.parts(source), self._staging.ring.copy_in)

    def copy_out(self, target: Tensor, source: Tensor) -> None:
        _copy(target, source, PINS.parts(target), self._staging.ring.copy_out)

    def mark(self) -> Event:
        event = _GpuEvent(self.vendor)
        event.recorded.record(self._compute)
        event.finish()
        return event

    def hold(self, event: Event) -> None:
        if event.is_done():  # nothing to order, nothing to time
            event.wait()
            return
        if isinstance(event, _GpuEvent):
            if event.held_by is self:  # by what else came in the same job
                return
            event.held_by = self
        wait = self._waited.pop() if self._waited else _Wait(self.vendor)
        wait.before.record(self._compute)
        _order(event, self._compute)
        wait.after.record(self._compute)
        self._waits.append(wait)

    def new_record(self) -> Record:
        return _GpuRecord(self.vendor, self._compute)

    def synchronize(self) -> None:
        reached = self.vendor.event()
        reached.record(self._compute)
        reached.synchronize()

    def trim(self) -> None:
        self._api.empty_cache()

    def take_wait_s(self) -> float:
        wait_ms: float = sum(wait.before.elapsed_time(wait.after) for wait in self._waits)
        self._waited += self._waits
        self._waits = []
        return wait_ms / 1e3

    def reset_peak(self) -> None:
        self._api.reset_peak_memory_stats(self.torch_device)
        self._retries = self._retries_so_far()

    def peak_bytes(self) -> int:
        return int(self._api.max_memory_allocated(self.torch_device))

    def allocator_use(self) -> AllocatorUse:
        reserved_bytes = int(self._api.max_memory_reserved(self.torch_device))
        retries = self._retries_so_far() - self._retries
        return AllocatorUse(self.peak_bytes(), reserved_bytes, retries)

    def _retries_so_far(self) -> int:
        return int(self._api.memory_stats(self.torch_device).get("num_alloc_retries", 0))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for stream in (self.load, self.fetch, self.unload, self.save):
            stream.close()
        try:
            # A step that failed may have left copies on their way, and what they use goes now.
            self._api.synchronize(self.torch_device)
        finally:
            CAPS[self.vendor.kind].remove(self.torch_device.index, self._cap_bytes)


class _Staging(threading.local):
    """Each stream's thread has a ring of its own."""

    def __init__(self, vendor: Vendor) -> None:
        self.ring = StagingRing(vendor)


def _copy(
    target: Tensor, source: Tensor, parts: Sequence[Part], stage: Callable[[Tensor, Tensor], None]
) -> None:
    """Enqueue a copy between device and host; none crosses from one part to the next.

    Args:
        target: On one side.
        source: On the other.
        parts: Of the one on the host.
        stage: Copies bytes of ordinary memory that was to be pinned.
    """
    if (len(parts) > 1 or parts[0].staged) and _same_layout(target, source):
        to, of = (
            tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
            for tensor in (target, source)
        )
        for start_bytes, stop_bytes, staged in parts:
            copy = stage if staged else _copy_pieces
            copy(to[start_bytes:stop_bytes], of[start_bytes:stop_bytes])
        return
    _copy_pieces(target, source)


def _same_layout(target: Tensor, source: Tensor) -> bool:
    same = target.dtype == source.dtype and target.stride() == source.stride()
    return same and is_dense(source)


def _copy_pieces(target: Tensor, source: Tensor) -> None:
    """Enqueue a copy; a long one in pieces, between which small and urgent ones come through."""
    if source.dim() != 1 or source.nbytes <= _PIECE_BYTES:
        target.copy_(source, non_blocking=True)
        return
    elements = _PIECE_BYTES // source.element_size()
    for to, of in zip(target.split(elements), source.split(elements), strict=True):
        to.copy_(of, non_blocking=True)
