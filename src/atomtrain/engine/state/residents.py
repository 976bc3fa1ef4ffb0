"""Resident blocks: each has a place of its own on the device for parameters and for gradients.

They come once a step, with the first segment that uses them. Their gradients add up in place and
leave once, with the last segment that adds to them (the one with the first user). What is updated
on the device (`engine/updates/device_updates.py`) neither comes nor leaves.

Buffers (masks, tables, running statistics) live on the device too. A layer that writes to its
buffers does so once for each micro-batch, in the order of ordinary training. When it is recomputed
it sees the values of that time, and what it writes is discarded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from atomtrain.analysis.costs.costs import ChainCosts
from atomtrain.analysis.layers.chain import Chain
from atomtrain.engine.devices.device import Device
from atomtrain.engine.state.gradients import Collector, accept_wide
from atomtrain.engine.state.store import HostStore, copy_on, gradient_view, view_of
from atomtrain.planning.plan.shape import Layers, Phase


class Copy(NamedTuple):
    """A copy that a stream is to make."""

    target: Tensor
    source: Tensor


class _Place(NamedTuple):
    """One block on the device."""

    parameters: Tensor  # [block_bytes] uint8
    gradients: Tensor  # [gradient_factor * bytes of its trainable parameters] uint8
    views: dict[int, Tensor]
    """Where each parameter's gradient adds up, by the parameter's `id`."""


class Residents:
    """The resident blocks of a plan."""

    def __init__(
        self,
        chain: Chain,
        blocks: Sequence[int],
        store: HostStore,
        device: Device,
        collector: Collector,
        first: int = 0,
        on_device: Collection[int] = (),
    ) -> None:
        """Allocate; call inside `Device.computing`.

        Args:
            chain: The model.
            blocks: Which blocks are resident.
            store: The host's parameters and gradients.
            device: Where the places are.
            collector: Takes the first gradient of each parameter.
            first: The first layer that runs on the device.
            on_device: Those of the blocks that are updated there.
        """
        self._on_device = frozenset(on_device)
        self.blocks = frozenset(blocks)
        self.leaves: dict[int, Tensor] = {}
        """Every resident parameter on the device, by the parameter's `id`."""
        self._store, self._layout, self._first = store, store.layout, first
        # A tensor each: autograd counts the changes of a tensor for all views of it, and one block
        # may come while a graph still holds another.
        self._places = {block: self._place(chain, block, device, collector) for block in blocks}

    def __contains__(self, block: int) -> bool:
        return block in self.blocks

    @property
    def storages(self) -> frozenset[int]:
        """Keys of the storages that hold parameters."""
        return frozenset(
            place.parameters.untyped_storage()._cdata for place in self._places.values()
        )

    def loads_with(self, layers: Layers) -> dict[int, Copy]:
        """Return what comes with a segment in forward, by its block."""
        return {block: self.load_of(block) for block in self.unloads_with(layers)}

    def unloads_with(self, layers: Layers) -> list[int]:
        """Return the blocks whose gradients leave with a segment in backward."""
        return [block for block in self.completed_by(layers) if block not in self._on_device]

    def completed_by(self, layers: Layers) -> list[int]:
        """Return the blocks whose first user is in a segment, the last one to add to gradients."""
        start, stop = layers
        first = {block: self._layout.users(block, self._first)[0] for block in self.blocks}
        return [block for block in sorted(self.blocks) if start <= first[block] < stop]

    def load_of(self, block: int) -> Copy:
        """Return the copy that brings a block to its place."""
        start, stop = self._layout.block_range(block)
        return Copy(self._places[block].parameters, self._store.parameters[start:stop])

    def unload_of(self, block: int) -> Copy:
        """Return the copy that takes a block's gradients to the host."""
        start, stop = self._layout.gradient_range(block)
        return Copy(self._store.gradients_of(start, stop), self._places[block].gradients)

    def save_of(self, block: int) -> Copy:
        """Return the copy that takes a block's parameters to the host."""
        place, store = self.load_of(block)
        return Copy(store, place)

    def gradient(self, block: int, key: int) -> Tensor:
        """Return where a parameter's gradient adds up, by the parameter's `id`."""
        return self._places[block].views[key]

    def expect(self, layers: Layers, waiting: dict[int, Tensor]) -> None:
        """Say where the first gradients of the segment's resident parameters go."""
        for block in self._layout.blocks_of(*layers):
            if block in self.blocks:
                for key, view in self._places[block].views.items():
                    if self.leaves[key].grad is None:
                        waiting[key] = view

    def release(self, layers: Layers) -> None:
        """Let go of the gradients that leave with a segment."""
        for block in self.completed_by(layers):
            for key in self._places[block].views:
                self.leaves[key].grad = None

    def _place(self, chain: Chain, block: int, device: Device, collector: Collector) -> _Place:
        of_gradients, factor = self._layout.gradients, self._layout.gradient_factor
        parameters = device.empty((self._layout.block_bytes(block),), torch.uint8)
        gradients = device.empty((factor * of_gradients.block_bytes(block),), torch.uint8)
        views = {}
        for parameter in self._members(chain, block):
            offset = self._layout.offsets[id(parameter)] - self._layout.block_range(block)[0]
            leaf = view_of(parameters, offset, parameter).detach()  # as in `Views.leaves`
            leaf.requires_grad_(parameter.requires_grad)
            accept_wide(leaf, factor)
            if parameter.requires_grad:
                leaf.register_post_accumulate_grad_hook(collector.hook(id(parameter)))
                offset = of_gradients.offsets[id(parameter)] - of_gradients.block_range(block)[0]
                views[id(parameter)] = gradient_view(gradients, offset, parameter, factor)
            self.leaves[id(parameter)] = leaf
        return _Place(parameters, gradients, views)

    def _members(self, chain: Chain, block: int) -> list[nn.Parameter]:
        shared = block >= len(self._layout.layers)
        start, _ = self._layout.block_range(block)
        return [
            parameter
            for parameter in chain.parameters
            if (
                self._layout.offsets[id(parameter)] == start and len(chain.users[id(parameter)]) > 1
                if shared
                else chain.users[id(parameter)] == (block,)
            )
        ]


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
                    copies[id(buffer)] = copy_on(device, buffer)
                here[name] = copies[id(buffer)]
            self._buffers.append(here)
        self.storages = frozenset(copy.untyped_storage()._cdata for copy in copies.values())
        """Keys of the storages of all of them."""
        self._before: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._versions = {id(host): _version(host) for host, _ in self._pairs()}

    @property
    def change(self) -> bool:
        """Whether any layer changes some."""
        return any(self._changing)

    def of(
        self, layer: int, micro_batch: int, phase: Phase, once: bool = False
    ) -> dict[str, Tensor]:
        """Return the buffers with which a layer runs; with `once` it will not be recomputed."""
        buffers = self._buffers[layer]
        if phase is Phase.BACKWARD and self._changing[layer]:
            return self._before.pop((layer, micro_batch))
        if phase is Phase.FORWARD and self._changing[layer] and not once:
            self._before[layer, micro_batch] = {n: b.clone() for n, b in buffers.items()}
        return buffers

    def changing(self, start: int, stop: int) -> frozenset[int]:
        """Return the keys of the storages that layers `start` to `stop` write to."""
        return frozenset(
            buffer.untyped_storage()._cdata
            for index in range(start, stop)
            if self._changing[index]
            for buffer in self._buffers[index].values()
        )

    def to_host(self) -> None:
        """Copy the buffers back into the model; call when the device is synchronised.

        What the caller wrote to the model's in the meantime stays, and comes to the device.
        """
        self.notice()
        with torch.no_grad():
            for host, here in self._pairs():
                host.copy_(here)
                self._versions[id(host)] = _version(host)

    def from_host(self) -> None:
        """Copy the model's buffers to the device again, after they were loaded."""
        self._versions.clear()
        self.notice()

    def notice(self) -> bool:
        """Copy those of the model's buffers that were written to; return whether any were."""
        found = False
        with torch.no_grad():
            for host, here in self._pairs():
                if self._versions.get(id(host)) != (version := _version(host)):
                    here.copy_(host)
                    self._versions[id(host)], found = version, True
        return found

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each buffer of the model with its copy on the device."""
        seen: set[int] = set()
        for layer, buffers in zip(self._chain.layers, self._buffers, strict=True):
            for name, here in buffers.items():
                host = layer.buffers[name]
                if id(host) not in seen:
                    seen.add(id(host))
                    yield host, here


def _version(tensor: Tensor) -> int:
    """Return a number that grows whenever somebody writes to a tensor, if torch counts that."""
    return 0 if tensor.is_inference() else tensor._version
