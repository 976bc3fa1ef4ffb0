"""The host as its own device: compute and host store share one memory, so nothing is copied.

Slots are the arena itself and gradients add up where the optimizer reads them. What is left of the
streams is their order: a segment waits for the updates of its blocks. Training takes the memory of
parameters, gradients, optimizer state and one segment's graphs, once each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from atomtrain.swapping.streams import Event, Inject, Stream, Wait, finished
from atomtrain.swapping.tracing import Record


class HostDevice:
    """A `Device` that is the host. It has no memory of its own, so its peak is 0."""

    one_memory = True

    def __init__(self, memory_bytes: int, inject: Inject | None = None) -> None:
        """Plans count slots and graphs against `memory_bytes`; nothing enforces it."""
        self.name = "cpu"
        self.torch_device = torch.device("cpu")
        self.generator = torch.default_generator
        self.memory_bytes = memory_bytes
        self.reserved_bytes = 0
        self.load = Stream("load", inject)
        self.fetch = Stream("fetch", inject)
        self.unload = Stream("unload", inject)
        self.save = Stream("save", inject)
        self._wait = Wait(inject)

    @contextmanager
    def computing(self) -> Iterator[None]:
        yield

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def on_host(self) -> AbstractContextManager[None]:
        return nullcontext()

    def host_empty(self, n_bytes: int) -> Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8)

    def copy_in(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def copy_out(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

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

    def reset_peak(self) -> None:
        pass

    def peak_bytes(self) -> int:
        return 0

    def close(self) -> None:
        for stream in (self.load, self.fetch, self.unload, self.save):
            stream.close()
