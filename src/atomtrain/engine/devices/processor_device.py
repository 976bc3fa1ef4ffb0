"""What devices that compute on the processor have in common: compute is the caller's own thread.

Torch's operations are done when they return there. So whatever compute was given is over at once,
and waiting for a stream blocks the thread.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atomtrain.engine.devices.streams import Event, Inject, Stream, Wait, finished
from atomtrain.engine.devices.tracing import Record


class ProcessorDevice:
    """The part of `Device` that does not depend on what the device stands for."""

    name: str
    host_stream: type[Stream] = Stream
    """Of its own streams too: all of them are threads of the host."""

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

    def close(self) -> None:
        for stream in (self.load, self.fetch, self.unload, self.save):
            stream.close()
