"""The host as its own device: compute and host store share one memory, so nothing is copied.

Slots are the arena itself, and gradients stay where autograd made them until the optimizer has used
them. What is left of the streams is their order: a segment waits for the updates of its blocks.
Training takes the memory of parameters, gradients, optimizer state and one segment's graphs, once
each.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from atomtrain.engine.devices.heap import give_back, keep_freed
from atomtrain.engine.devices.processor_device import ProcessorDevice
from atomtrain.engine.devices.streams import EagerStream, Inject, Stream


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
