"""The CUDA device: one CUDA stream per direction and purpose, ordered by events.

Each stream's thread only enqueues; what must be finished before a copy is expressed as
`wait_event` on the CUDA stream. Events of host work (optimizer updates) block the thread instead,
so a copy is never enqueued before the host data are final.
"""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from atomtrain.engine.devices.host_memory import aligned_empty
from atomtrain.engine.devices.streams import Event, Inject, Job, Stream
from atomtrain.engine.devices.tracing import Record
from atomtrain.errors import ConfigError, DeviceMemoryError, StreamError
from atomtrain.units import format_bytes

_ROUNDING_BYTES = 64 << 20
_PIECE_BYTES = 32 << 20
"""About a millisecond of the link. A copy engine serves streams in turns, copy by copy."""
_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for all GPUs, since several may load from one copy."""
_CUBLAS_WORKSPACE = ":4096:8"
"""The same everywhere: eight buffers of 4 MiB, what PyTorch takes on Hopper, and with which cuBLAS
adds in the same order each time."""
_COMPUTING_THREADS = 2
"""The caller's, and autograd's for backward: each has a handle of cuBLAS with its own workspace."""
_BESIDE_BYTES = 8 << 20
"""Workspaces of cuBLASLt, and other small things that PyTorch keeps."""


class _CudaEvent(Event):
    """Finished when the work is enqueued; `wait` and `order` then go by the CUDA event."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded = torch.cuda.Event()

    def wait(self) -> None:
        super().wait()
        self.recorded.synchronize()

    def is_done(self) -> bool:
        return super().is_done() and self.recorded.query()

    def order(self, stream: torch.cuda.Stream) -> None:
        """Let `stream` go on only after the work; blocks until the work is enqueued."""
        super().wait()
        stream.wait_event(self.recorded)


class _CudaRecord(Record):
    """Times device work by CUDA events; host updates on the host, from the same zero."""

    def __init__(self, compute: torch.cuda.Stream) -> None:
        super().__init__()
        compute.synchronize()
        self._zero_s = time.perf_counter()
        self._zero = torch.cuda.Event(enable_timing=True)
        self._zero.record(compute)

    def device_now(self) -> Any:
        moment = torch.cuda.Event(enable_timing=True)
        moment.record()
        return moment

    def _seconds(self, moment: Any) -> float:
        if not isinstance(moment, torch.cuda.Event):
            return super()._seconds(moment)
        moment.synchronize()
        return self._zero_s + float(self._zero.elapsed_time(moment)) / 1e3


class _CudaStream(Stream):
    """Enqueues jobs on a CUDA stream."""

    def __init__(self, name: str, device: torch.device, inject: Inject | None) -> None:
        self._device = device
        self._cuda = torch.cuda.Stream(device)
        super().__init__(name, inject)

    def _new_event(self) -> Event:
        return _CudaEvent()

    def _now(self, record: Record) -> Any:
        return record.device_now()

    def _run(self, job: Job, after: Sequence[Event], event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        with torch.cuda.device(self._device), torch.cuda.stream(self._cuda):
            for earlier in after:
                _order(earlier, self._cuda)
            if self._inject is not None:
                self._inject(self.name)
            job()
            event.recorded.record(self._cuda)


def _order(event: Event, stream: torch.cuda.Stream) -> None:
    if isinstance(event, _CudaEvent):
        event.order(stream)
    else:
        event.wait()


def library_bytes() -> int:
    """Return what libraries keep of a GPU's budget; from now on cuBLAS's workspace is that."""
    # Read when cuBLAS is first used.
    return workspace_bytes(os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _CUBLAS_WORKSPACE))


def workspace_bytes(config: str) -> int:
    """Return what cuBLAS and cuBLASLt keep for themselves through PyTorch's allocator.

    Args:
        config: The environment variable `CUBLAS_WORKSPACE_CONFIG`, such as `:4096:8`: buffers of so
            many KiB, and how many of them.
    """
    sizes = re.findall(r":([0-9]+):([0-9]+)", config)
    kept = sum(int(kib) * int(count) << 10 for kib, count in sizes)
    return _COMPUTING_THREADS * kept + _BESIDE_BYTES


class Caps:
    """How much of each GPU this process may take: the budgets of its open devices together, and
    when the last one is closed as much as before the first one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, list[int]] = {}
        self._before: dict[int, float] = {}

    def add(self, index: int, n_bytes: int) -> None:
        """Take note of a device that was opened on GPU `index`."""
        with self._lock:
            budgets = self._open.setdefault(index, [])
            if not budgets:
                self._before[index] = torch.cuda.get_per_process_memory_fraction(index)
            budgets.append(n_bytes)
            self._apply(index)

    def remove(self, index: int, n_bytes: int) -> None:
        """Take note of a device that was closed."""
        with self._lock:
            self._open[index].remove(n_bytes)
            self._apply(index)

    def _apply(self, index: int) -> None:
        budgets, share = self._open[index], self._before[index]
        if budgets:
            _, total_bytes = torch.cuda.mem_get_info(index)
            share = min(1.0, sum(budgets) / total_bytes)
        torch.cuda.set_per_process_memory_fraction(share, index)


_CAPS = Caps()


class CudaDevice:
    """A `Device` on a GPU, its memory capped at the budget."""

    one_memory = False
    host_stream: type[Stream] = Stream

    def __init__(
        self, index: int, memory_bytes: int | None = None, inject: Inject | None = None
    ) -> None:
        """Use GPU `index`; `memory_bytes` of `None` allows 90% of what is free now.

        Raises:
            ConfigError: there is no such GPU, or it has less memory than the budget.
        """
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            raise ConfigError(
                f"there is no CUDA device {index}; {torch.cuda.device_count()} are usable. "
                "Without a GPU use --device emulated:4GiB/s"
            )
        self.torch_device = torch.device("cuda", index)
        self.inject = inject
        self.name = torch.cuda.get_device_name(index)
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        if memory_bytes is None:
            memory_bytes = int(0.9 * free_bytes)
        if memory_bytes > total_bytes:
            raise ConfigError(
                f"--device-memory {memory_bytes} is more than {self.name} has ({total_bytes} bytes)"
            )
        self.memory_bytes = memory_bytes
        # Enforced below. The allocator reserves blocks of 2 to 20 MiB that it fills only
        # partly, so what it may reserve is a little more than what may be in use.
        self._cap_bytes = min(total_bytes, memory_bytes + _ROUNDING_BYTES)
        self.reserved_bytes = library_bytes()
        torch.cuda.init()
        self.generator = torch.cuda.default_generators[index]
        self.load: Stream = _CudaStream("load", self.torch_device, inject)
        self.fetch: Stream = _CudaStream("fetch", self.torch_device, inject)
        self.unload: Stream = _CudaStream("unload", self.torch_device, inject)
        self.save: Stream = _CudaStream("save", self.torch_device, inject)
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._compute = torch.cuda.current_stream(self.torch_device)
        self._closed = False
        _CAPS.add(index, self._cap_bytes)

    @contextmanager
    def computing(self) -> Iterator[None]:
        try:
            with torch.cuda.device(self.torch_device), torch.cuda.stream(self._compute):
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
        double the host memory of a large model. A page that is pinned for one tensor cannot be
        pinned for another, so no page is shared.
        """
        if n_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        tensor = aligned_empty(n_bytes)[:n_bytes]
        runtime = torch.cuda.cudart()
        address = tensor.data_ptr()
        code = int(runtime.cudaHostRegister(address, n_bytes, _PORTABLE))
        if code != 0:
            raise StreamError(
                f"pinning {n_bytes} bytes of host memory failed with CUDA error {code}; raise the "
                "limit of locked memory (ulimit -l unlimited) or choose a smaller model"
            )
        # Unpinned before the memory itself is freed: the storage's finalizer runs first.
        weakref.finalize(tensor.untyped_storage(), runtime.cudaHostUnregister, address)
        return tensor

    def copy_in(self, target: Tensor, source: Tensor) -> None:
        _copy(target, source)

    def copy_out(self, target: Tensor, source: Tensor) -> None:
        _copy(target, source)

    def mark(self) -> Event:
        event = _CudaEvent()
        event.recorded.record(self._compute)
        event.finish()
        return event

    def hold(self, event: Event) -> None:
        if event.is_done():  # nothing to order, nothing to time
            event.wait()
            return
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(self._compute)
        _order(event, self._compute)
        after.record(self._compute)
        self._waits.append((before, after))

    def new_record(self) -> Record:
        return _CudaRecord(self._compute)

    def synchronize(self) -> None:
        self._compute.synchronize()

    def trim(self) -> None:
        torch.cuda.empty_cache()

    def take_wait_s(self) -> float:
        waits, self._waits = self._waits, []
        wait_ms: float = sum(before.elapsed_time(after) for before, after in waits)
        return wait_ms / 1e3

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.torch_device)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for stream in (self.load, self.fetch, self.unload, self.save):
            stream.close()
        try:
            # A step that failed may have left copies on their way, and what they use goes now.
            torch.cuda.synchronize(self.torch_device)
        finally:
            _CAPS.remove(self.torch_device.index, self._cap_bytes)


def _copy(target: Tensor, source: Tensor) -> None:
    """Enqueue a copy; a long one in pieces, between which small and urgent ones come through."""
    if source.dim() != 1 or source.nbytes <= _PIECE_BYTES:
        target.copy_(source, non_blocking=True)
        return
    elements = _PIECE_BYTES // source.element_size()
    for to, of in zip(target.split(elements), source.split(elements), strict=True):
        to.copy_(of, non_blocking=True)
