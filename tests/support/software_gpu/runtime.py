"""The functions of `torch.cuda`, put in the place of the real ones."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support.software_gpu import copies, operations, streams
from tests.support.software_gpu.generators import DeviceGenerator
from tests.support.software_gpu.memory import Blocks, Memory
from tests.support.software_gpu.order import NotEmulatedError, Queue, Scheduler
from tests.support.software_gpu.tensors import GpuTensor

NAME = "NVIDIA H100 80GB HBM3"
"""Whose rates the catalogue has."""
TOTAL_BYTES = 1 << 30
_MOST_REPORTS = 100
_SLEEP_CYCLES = 1_000_000
"""Of a kernel that does nothing, for each time that others may go first."""


class Properties(NamedTuple):
    """Of a GPU."""

    name: str
    total_memory: int
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 132
    L2_cache_size: int = 50 << 20


class SoftwareGpus:
    """Some GPUs, and what went wrong with them.

    Attributes:
        reports: What a real GPU would have passed over in silence: accesses to the same memory
            that nothing orders, memory freed or unpinned too early.
    """

    def __init__(self, count: int, total_bytes: int, seed: int) -> None:
        self.reports: list[str] = []
        self.scheduler = Scheduler(seed)
        self.memories = [Memory(total_bytes) for _ in range(count)]
        self.blocks = Blocks(self.scheduler, self.memories, self.report)
        self.pinned = copies.Pinned(self.scheduler, self.report)
        self.generators = tuple(
            DeviceGenerator(torch.device("cuda", index)) for index in range(count)
        )
        self.current = streams.Current()
        self.special = operations.SPECIAL
        self.on_processor = operations.ON_PROCESSOR
        self._defaults: dict[int, Any] = {}

    def report(self, what: str) -> None:
        """Note something that is wrong, once; much of it is as bad as more."""
        if len(self.reports) < _MOST_REPORTS and what not in self.reports:
            self.reports.append(what)

    def index_of(self, device: Any) -> int:
        """Return the number of a GPU, of the thread's if it is not said."""
        if device is None:
            return self.current.device
        if isinstance(device, int):
            return device
        device = torch.device(device)
        if device.type != "cuda":
            raise ValueError(f"Expected a cuda device, but got: {device}")
        return self.current.device if device.index is None else device.index

    def current_stream(self, device: Any = None) -> Any:
        """Return the calling thread's stream on a GPU."""
        index = self.index_of(device)
        return self.current.streams.get(index) or self.default_stream(index)

    def default_stream(self, device: Any = None) -> Any:
        """Return the stream that is current where none was chosen."""
        index = self.index_of(device)
        with self.scheduler.lock:
            if index not in self._defaults:
                self._defaults[index] = streams.Stream(index)
            return self._defaults[index]

    def queue_of(self, device: torch.device) -> Queue:
        """Return where the calling thread's work on a GPU goes."""
        self.raise_last_error()
        queue: Queue = self.current_stream(device).queue
        return queue

    def raise_last_error(self) -> None:
        """Raise what the last call of the runtime returned, as PyTorch does after each launch."""
        code, self.pinned.last_error = self.pinned.last_error, 0
        if code:
            raise RuntimeError(f"CUDA error: code {code}, of an earlier call")

    def seed(self, device: torch.device) -> int:
        """Return the seed of the next operation that draws random numbers."""
        return self.generators[device.index].next_seed()

    def finish(self) -> None:
        """Run all that waits, and free what nobody holds."""
        for index in range(len(self.memories)):
            self.scheduler.finish_device(index)
        self.blocks.collect()


class _Code:
    """An error code as the runtime returns it: no number, but it can be made one."""

    def __init__(self, code: int) -> None:
        self._code = code

    def __int__(self) -> int:
        return self._code


class _Cudart:
    def __init__(self, pinned: copies.Pinned) -> None:
        self._pinned = pinned

    def cudaHostRegister(self, ptr: int, size: int, flags: int) -> _Code:  # noqa: N802
        return _Code(self._pinned.register(ptr, size))

    def cudaHostUnregister(self, ptr: int) -> _Code:  # noqa: N802
        return _Code(self._pinned.unregister(ptr))


def functions(gpus: SoftwareGpus) -> dict[str, Callable[..., Any]]:
    """Return what takes the place of the functions of `torch.cuda`, by name."""

    def memory(device: Any) -> Memory:
        gpus.blocks.collect()
        return gpus.memories[gpus.index_of(device)]

    def is_available() -> bool:
        return True

    def is_initialized() -> bool:
        return True

    def init() -> None: ...

    def device_count() -> int:
        return len(gpus.memories)

    def current_device() -> int:
        return gpus.current.device

    def set_device(device: Any) -> None:
        gpus.current.device = gpus.index_of(device)

    def get_device_name(device: Any = None) -> str:
        return NAME

    def get_device_capability(device: Any = None) -> tuple[int, int]:
        return 9, 0

    def get_device_properties(device: Any = None) -> Properties:
        return Properties(NAME, memory(device).total_bytes)

    def empty_cache() -> None:
        gpus.blocks.collect()

    def current_stream(device: Any = None) -> Any:
        return gpus.current_stream(device)

    def default_stream(device: Any = None) -> Any:
        return gpus.default_stream(device)

    def stream(stream: Any) -> Any:
        return streams.StreamContext(stream)

    def set_stream(stream: Any) -> None:
        gpus.current.device = stream.device.index
        gpus.current.streams[stream.device.index] = stream

    def synchronize(device: Any = None) -> None:
        gpus.blocks.collect()
        gpus.scheduler.finish_device(gpus.index_of(device))

    def _sleep(cycles: int) -> None:
        gpus.raise_last_error()
        queue = gpus.current_stream().queue
        gpus.scheduler.submit(queue, None, sleeps=min(1000, 1 + int(cycles) // _SLEEP_CYCLES))

    def cudart() -> _Cudart:
        return _Cudart(gpus.pinned)

    def manual_seed(seed: int) -> None:
        gpus.generators[gpus.current.device].manual_seed(seed)

    def manual_seed_all(seed: int) -> None:
        for generator in gpus.generators:
            generator.manual_seed(seed)

    def get_rng_state(device: Any = "cuda") -> Tensor:
        return gpus.generators[gpus.index_of(device)].get_state()

    def set_rng_state(new_state: Tensor, device: Any = "cuda") -> None:
        gpus.generators[gpus.index_of(device)].set_state(new_state)

    found = {**locals(), **_memory_functions(gpus)}
    return {name: thing for name, thing in found.items() if name not in ("gpus", "memory")}


def _memory_functions(gpus: SoftwareGpus) -> dict[str, Callable[..., Any]]:
    def memory(device: Any) -> Memory:
        gpus.blocks.collect()
        return gpus.memories[gpus.index_of(device)]

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        of = memory(device)
        return of.total_bytes - of.used_bytes, of.total_bytes

    def get_per_process_memory_fraction(device: Any = None) -> float:
        return memory(device).fraction

    def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
        if not isinstance(fraction, float):
            raise TypeError("Invalid type for fraction argument, must be `float`")
        if fraction < 0 or fraction > 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        memory(device).fraction = fraction

    def memory_allocated(device: Any = None) -> int:
        return memory(device).used_bytes

    def max_memory_allocated(device: Any = None) -> int:
        return memory(device).peak_bytes

    def memory_reserved(device: Any = None) -> int:
        return memory(device).used_bytes

    def max_memory_reserved(device: Any = None) -> int:
        return memory(device).peak_bytes

    def memory_stats(device: Any = None) -> dict[str, Any]:
        return {"num_alloc_retries": memory(device).retries}

    def reset_peak_memory_stats(device: Any = None) -> None:
        memory(device).peak_bytes = memory(device).used_bytes

    return dict(locals())


def backward_of(gpus: SoftwareGpus, real: Callable[..., None]) -> Callable[..., None]:
    """Return `torch.autograd.backward` as it is with a GPU: on another thread, which has chosen
    the stream that forward had. That is taken to be the caller's."""

    def backward(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        def call() -> None:
            real(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)

        roots = tensors if isinstance(tensors, list | tuple) else [tensors]
        seeds = grad_tensors if isinstance(grad_tensors, list | tuple) else [grad_tensors]
        if not any(isinstance(one, GpuTensor) for one in (*roots, *seeds)):
            call()
            return
        errors: list[BaseException] = []
        device, chosen = gpus.current.device, dict(gpus.current.streams)

        def run() -> None:
            gpus.current.device, gpus.current.streams = device, chosen
            try:
                with torch.autograd.set_multithreading_enabled(False):
                    call()
            except BaseException as error:  # noqa: BLE001  raised below
                errors.append(error)

        thread = threading.Thread(target=run, name="autograd of GPUs")
        thread.start()
        thread.join()
        if errors:
            raise errors[0]

    return backward


@contextlib.contextmanager
def installed(
    *, count: int = 1, total_bytes: int = TOTAL_BYTES, seed: int = 0
) -> Iterator[SoftwareGpus]:
    """Put GPUs in software in the place of `torch.cuda`; at the end run what still waits."""
    gpus = SoftwareGpus(count, total_bytes, seed)
    with pytest.MonkeyPatch.context() as patch, operations.factories(gpus):
        given = functions(gpus)
        for name in torch.cuda.__all__:
            if callable(getattr(torch.cuda, name)) and not isinstance(
                getattr(torch.cuda, name), type
            ):
                patch.setattr(torch.cuda, name, _not_emulated(name))
        for name, function in given.items():
            patch.setattr(torch.cuda, name, function)
        patch.setattr(torch.cuda, "_lazy_init", given["init"])
        for name, kind in (
            ("Stream", streams.Stream),
            ("Event", streams.Event),
            ("device", streams.DeviceContext),
            ("StreamContext", streams.StreamContext),
        ):
            patch.setattr(kind, "gpus", gpus, raising=False)
            patch.setattr(torch.cuda, name, kind)
        patch.setattr(torch.cuda, "default_generators", gpus.generators)
        # By these, code asks for GPUs of any maker.
        patch.setattr(torch.accelerator, "is_available", given["is_available"])
        patch.setattr(torch, "get_device_module", _module(torch.get_device_module))
        patch.setattr(GpuTensor, "gpus", gpus)
        patch.setattr(torch.autograd, "backward", backward_of(gpus, torch.autograd.backward))
        patch.setattr(torch.Tensor, "is_pinned", _is_pinned(gpus))
        patch.setattr(torch.Tensor, "cuda", _cuda(gpus))
        real_device = torch.UntypedStorage.device
        patch.setattr(torch.UntypedStorage, "device", _storage_device(gpus, real_device))
        yield gpus
        if gpus.scheduler.error is None:
            gpus.finish()


def _module(real: Callable[..., Any]) -> Callable[..., Any]:
    def get_device_module(device: Any = None) -> Any:
        return torch.cuda if device is None else real(device)

    return get_device_module


def _not_emulated(name: str) -> Callable[..., Any]:
    def missing(*_: Any, **__: Any) -> Any:
        raise NotEmulatedError(f"torch.cuda.{name}")

    return missing


def _cuda(gpus: SoftwareGpus) -> Callable[..., Tensor]:
    def cuda(tensor: Tensor, device: Any = None, non_blocking: bool = False) -> Tensor:
        # Without a number, torch would ask a driver that is not there.
        return tensor.to(torch.device("cuda", gpus.index_of(device)), non_blocking=non_blocking)

    return cuda


def _is_pinned(gpus: SoftwareGpus) -> Callable[[Tensor], bool]:
    def is_pinned(tensor: Tensor) -> bool:
        return tensor.numel() > 0 and gpus.pinned.accesses_of(tensor) is not None

    return is_pinned


def _storage_device(gpus: SoftwareGpus, real: Any) -> property:
    def device(storage: torch.UntypedStorage) -> torch.device:
        found = gpus.blocks.device_of(storage)
        if found is not None:
            return found
        of: torch.device = real.__get__(storage) if hasattr(real, "__get__") else real
        return of

    return property(device)
