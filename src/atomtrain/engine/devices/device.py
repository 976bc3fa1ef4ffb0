"""What the executor asks of a device, whether a GPU, emulated or the host itself.

One device owns all streams. Why each exists:

| stream | direction | carries | why it is apart |
|---|---|---|---|
| compute | - | the caller's thread | |
| load | host to device | parameters, seeds of shared gradients | prefetched a visit ahead |
| fetch | host to device | values and gradients of micro-batches | loads may wait for an update |
| unload | device to host | gradients | once a visit |
| save | device to host | values and gradients of micro-batches | small and urgent |
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from atomtrain.engine.devices.streams import Event, Inject, Record, Stream


class AllocatorUse(NamedTuple):
    """What became of a device's memory since its peak was reset."""

    peak_bytes: int
    """Most that was in use."""
    reserved_peak_bytes: int
    """Most that the allocator had taken from the device, gaps and what it keeps included."""
    retries: int
    """How often it had to give memory back, and wait for the device, before it could allocate."""


class Device(Protocol):
    """A device with its own memory behind a link."""

    name: str
    torch_device: torch.device
    generator: torch.Generator
    """The random numbers that operations on this device draw by default."""
    one_memory: bool
    """Host and device memory are one: slots are the arena, values stay where they are."""
    memory_bytes: int
    """The budget; enforced, unless memory is one."""
    asked_bytes: int | None
    """The budget that somebody asked for; `None`: it is what there was."""
    reserved_bytes: int
    """Part of the budget that libraries take and plans cannot use."""
    host_stream: type[Stream]
    """What updates run on."""
    inject: Inject | None
    """Called before each job of each stream, those of the host too; for tests."""
    load: Stream
    fetch: Stream
    unload: Stream
    save: Stream

    def computing(self) -> AbstractContextManager[None]:
        """Everything that allocates device memory on the calling thread happens inside this."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate on the device; call inside `computing`."""
        ...

    def on_host(self) -> AbstractContextManager[None]:
        """What is allocated on the host inside this is not device memory."""
        ...

    def host_empty(self, n_bytes: int) -> Tensor:
        """Allocate `n_bytes` of host memory (uint8) from which copies are fast."""
        ...

    def copy_in(self, target: Tensor, source: Tensor) -> None:
        """Copy from host to device; only inside a job of `load` or `fetch`."""
        ...

    def copy_out(self, target: Tensor, source: Tensor) -> None:
        """Copy from device to host; only inside a job of `unload` or `save`."""
        ...

    def mark(self) -> Event:
        """Return an event for all that compute was given so far."""
        ...

    def hold(self, event: Event) -> None:
        """Make compute wait for an event; the time counts as waiting for the link. Once is enough
        for all that the event is of."""
        ...

    def new_record(self) -> Record:
        """Return an empty record for the spans of a step."""
        ...

    def synchronize(self) -> None:
        """Block until compute is done."""
        ...

    def trim(self) -> None:
        """Give back memory that is allocated but not in use, after measuring."""
        ...

    def take_wait_s(self) -> float:
        """Return the seconds that compute waited since the last call; call when synchronised."""
        ...

    def reset_peak(self) -> None:
        """Start a new peak."""
        ...

    def peak_bytes(self) -> int:
        """Return the most device memory in use since `reset_peak`."""
        ...

    def allocator_use(self) -> AllocatorUse:
        """Return what became of the memory since `reset_peak`."""
        ...

    def close(self) -> None:
        """End the streams."""
        ...
