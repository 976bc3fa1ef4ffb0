"""Buffers (masks, tables, running statistics) live on the device; changes end up right.

A layer that writes to its buffers does so once for each micro-batch, in the order of ordinary
training. When it is recomputed it sees the values of that time, and what it writes is discarded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from atomtrain.analysis.costs.costs import ChainCosts
from atomtrain.analysis.layers.chain import Chain
from atomtrain.engine.devices.device import Device
from atomtrain.planning.plan.shape import Phase


class DeviceBuffers:
    """The device copies of all buffers of a chain."""

    def __init__(self, chain: Chain, costs: ChainCosts, device: Device, first: int = 0) -> None:
        """Copy the buffers of layers from `first` on to the device, inside `Device.computing`."""
        self._device = device
        self._chain = chain
        self._changing = [cost.changes_buffers for cost in costs.layers]
        copies: dict[int, Tensor] = {}
        self._buffers: list[dict[str, Tensor]] = []
        for index, layer in enumerate(chain.layers):
            here = {}
            for name, buffer in layer.buffers.items() if index >= first else ():
                if id(buffer) not in copies:
                    copy = device.empty(tuple(buffer.shape), buffer.dtype)
                    copy.copy_(buffer)
                    copies[id(buffer)] = copy
                here[name] = copies[id(buffer)]
            self._buffers.append(here)
        self.storages = frozenset(copy.untyped_storage()._cdata for copy in copies.values())
        """Keys of the storages of all of them."""
        self._before: dict[tuple[int, int], dict[str, Tensor]] = {}

    @contextmanager
    def of(
        self, layer: int, micro_batch: int, phase: Phase, once: bool = False
    ) -> Iterator[dict[str, Tensor]]:
        """Give the buffers with which a layer runs; with `once` it will not be recomputed."""
        buffers = self._buffers[layer]
        if phase is Phase.BACKWARD and self._changing[layer]:
            yield self._before.pop((layer, micro_batch))
            return
        if phase is Phase.FORWARD and self._changing[layer] and not once:
            self._before[layer, micro_batch] = {n: b.clone() for n, b in buffers.items()}
        yield buffers

    def changing(self, start: int, stop: int) -> frozenset[int]:
        """Return the keys of the storages that layers `start` to `stop` write to."""
        return frozenset(
            buffer.untyped_storage()._cdata
            for index in range(start, stop)
            if self._changing[index]
            for buffer in self._buffers[index].values()
        )

    def to_host(self) -> None:
        """Copy the buffers back into the model; call when the device is synchronised."""
        with torch.no_grad():
            for layer, buffers in zip(self._chain.layers, self._buffers, strict=True):
                for name, buffer in buffers.items():
                    layer.buffers[name].copy_(buffer)

    def from_host(self) -> None:
        """Copy the model's buffers to the device again, after they were loaded."""
        with torch.no_grad():
            for layer, buffers in zip(self._chain.layers, self._buffers, strict=True):
                for name, buffer in buffers.items():
                    buffer.copy_(layer.buffers[name])
