"""Memory that a plan needs, in bytes: the formula behind `PlanError` and the printed plan.

The device holds slots, gradient buffers, resident blocks, the model's buffers, and what the
busiest visit needs beside them: the values and gradients that stand at its cuts, and the workspace
of one micro-batch; what kept segments save; and, from the first offloaded segment up and down again
to it, but not at the turn, the window of what is on its way to the host or back. Only what is kept
grows with depth. The formulas of one visit are in `visit_memory.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atomtrain.analysis.costs.costs import ChainCosts
from atomtrain.analysis.layers.chain import Chain
from atomtrain.planning.cost.segments import segments_of
from atomtrain.planning.cost.visit_memory import visit_bytes
from atomtrain.planning.plan.disk import DiskUse
from atomtrain.planning.plan.layout import host_gradients
from atomtrain.planning.plan.shape import Activation, Boundary, Phase, Shape, training_visits
from atomtrain.planning.plan.updating import UpdateModel, two_moments

_PROCESS_BYTES = 4608 << 10
_LAYER_BYTES = 460 << 10
"""Measured (benchmark `plan`, chains of 6 to 26 layers): at most 15 MiB in all, with the longest
chain. What was allocated in small pieces to analyse and plan it leaves holes in the C library's
heap, 11 MiB there, over which each step then scatters graphs and hand-overs of 4 MiB."""
_SENT_STORAGE_BYTES = 14 << 10
"""Of each storage that an offloaded segment sends, beside its bytes, until backward comes for it.
Measured in the same chains: its share of the graph that waits, 10 KiB (62 KiB of a transformer
block's six), and the page that its host buffer begins or ends within."""


def process_bytes(layers: int, sent_storages: int) -> int:
    """Return what a process takes on the host beside tensors: stacks and heaps of its threads,
    Python's objects; grows with the chain's length, and with what all
    micro-batches send to the host."""
    return _PROCESS_BYTES + layers * _LAYER_BYTES + sent_storages * _SENT_STORAGE_BYTES


class Sizes(NamedTuple):
    slot_bytes: int
    gradient_bytes: int


class MemoryModel:
    """Answers what a shape needs on the device and on the host."""

    def __init__(
        self,
        chain: Chain,
        costs: ChainCosts,
        micro_batches: int,
        updates: UpdateModel | None = None,
        disk: DiskUse | None = None,
        devices: int = 1,
        *,
        spends: bool = False,
    ) -> None:
        """`updates` says what the optimizer takes; `None` is AdamW. `devices` share the host.
        `spends`: gradients share staging buffers there."""
        self.spends = spends
        self._chain, self._costs = chain, costs
        self.micro_batches = micro_batches
        self._all = segments_of(chain, costs)
        self.layout, self.saved = self._all.layout, self._all.saved
        self._updates = updates or two_moments(chain)
        self._updated = self._updates.of_blocks(chain, self.layout)
        self._disk, self._devices = disk, devices
        self.buffers_bytes = self._buffers_bytes()
        """Buffers on the device, each storage once; those that forward changes also as they were
        for each micro-batch."""

    @property
    def updates_on_device(self) -> bool:
        return self._updates.device_scratch_bytes is not None

    @property
    def device_scratch_bytes(self) -> int:
        """What an update on the device needs beside the state."""
        return self._updates.device_scratch_bytes or 0

    def device_bytes(self, shape: Shape) -> int:
        work = kept = 0
        there = bool(shape.device_blocks)
        away = {
            layers: self.sent_bytes(*layers)
            for layers, how in shape.waiting.items()
            if how == "offload"
        }
        for visit in training_visits(shape):
            how = visit.activation
            own = self.saved_bytes(*visit.layers) if how == "keep" else 0
            if visit.phase is Phase.BACKWARD:
                kept -= own
            # Sent by this visit and those below it, or still to come back for them.
            moving = sum(n for layers, n in away.items() if layers[0] <= visit.layers[0])
            if visit.phase is Phase.TURN:  # all has left before it, and comes back after it
                moving = 0
            window = min(self.saved.window_bytes, moving)
            need = self.work_bytes(visit.phase, *visit.layers, shape.boundary, how, there)
            work = max(work, need + kept + window)
            if visit.phase is Phase.FORWARD:
                kept += own
        return work + self.held_bytes(shape)

    def held_bytes(self, shape: Shape) -> int:
        """Return what is on the device whichever visit runs."""
        sizes = self.sizes(shape)
        return (
            shape.slots * sizes.slot_bytes
            + shape.gradient_buffers * sizes.gradient_bytes
            + self.fixed_bytes(shape.resident_blocks, shape.device_blocks)
        )

    def fixed_bytes(self, resident: Collection[int], on_device: Collection[int] = ()) -> int:
        """Return what is on the device whatever the partition."""
        # Each micro-batch's loss, a scalar, stays until the step ends.
        layout = self.layout
        places = sum(layout.block_arena_bytes(block) for block in resident)
        if layout.gradient_factor > 1:  # one gradient at a time is widened
            trained = (p for p in self._chain.parameters if p.requires_grad)
            places += max(4 * parameter.numel() for parameter in trained)
        if on_device:
            places += sum(self._updated[block].device_bytes for block in on_device)
        return places + self.buffers_bytes + 8 * self.micro_batches

    def sizes(self, shape: Shape) -> Sizes:
        """Return the bytes of a slot and of a gradient buffer.

        Each takes the largest segment of both partitions. So any two partitions go
        together, which keeps the search for the best pair of them exact.
        """
        resident = frozenset(shape.resident_blocks)
        pairs = (
            *itertools.pairwise(shape.forward_bounds),
            *itertools.pairwise(shape.backward_bounds),
        )
        layout = self.layout
        most = max(layout.gradients.segment_bytes(*pair, resident) for pair in pairs)
        return Sizes(
            max(layout.segment_bytes(*pair, resident) for pair in pairs),
            layout.gradient_factor * most,
        )

    def host_bytes(self, shape: Shape) -> int:
        """Return parameters, gradients, optimizer state, micro-batches, waiting values, and the
        rest."""
        first = shape.host_layers
        waiting = self._waiting_bytes(shape)
        # Gradients on their way to layers on the host.
        waiting += self.micro_batches * self._bytes(self._chain.writes(0, first))
        given_bytes = self._bytes(self._chain.inputs)
        waiting += self.micro_batches * given_bytes
        waiting += self.host_backward_bytes(first)
        process = process_bytes(len(self._costs.layers), self._devices * self.sent_storages(shape))
        if self.spends:  # else they are in the state
            waiting += host_gradients(self.layout, shape, spends=True).total_bytes
        # The example stays beside them where a model looks at its data.
        return self.state_bytes + self._devices * waiting + given_bytes + process

    def host_backward_bytes(self, host_layers: int) -> int:
        """Return what backward of layers on the host makes of one gradient: as much as the weights.

        Then no visit runs on the device: backward is over, and the next forward waits for it.
        """
        return sum(cost.parameter_bytes for cost in self._costs.layers[:host_layers])

    def sent_storages(self, shape: Shape) -> int:
        """Return how many storages of offloaded segments all micro-batches send to the host."""
        sent = [
            self.saved.of(*layers).sent for layers, how in shape.waiting.items() if how == "offload"
        ]
        return self.micro_batches * sum(sent)

    @property
    def state_bytes(self) -> int:
        """Parameters, optimizer state, staging memory for what is on disk, and gradients: but where
        these share staging buffers, which depend on the shape."""
        layout = self.layout
        kept = layout.total_bytes if self.spends else layout.arena_bytes
        kept += self._updates.host_bytes
        if self._disk is None:
            return kept
        return kept + self._disk.staging_bytes - self._disk.saved_bytes

    def least_layer_bytes(self, index: int) -> int:
        """Return the least device bytes with which the layer alone could be a segment."""
        boundaries: tuple[Boundary, ...] = ("device", "host")
        phase = Phase.TURN if index + 1 == len(self._chain.layers) else Phase.BACKWARD
        work = min(self.work_bytes(phase, index, index + 1, b) for b in boundaries)
        layout = self.layout
        gradients = layout.gradient_factor * layout.gradients.segment_bytes(index, index + 1)
        return layout.segment_bytes(index, index + 1) + gradients + work

    def work_bytes(
        self,
        phase: Phase,
        start: int,
        stop: int,
        boundary: Boundary,
        activation: Activation = "recompute",
        on_device: bool = False,
    ) -> int:
        """Return the peak of a visit beside what is held, the window, and other kept segments.

        Args:
            activation: What happens to what the segment saves; the turn has none of it.
            on_device: Whether blocks are updated on the device.
        """
        scratch = self.device_scratch_bytes if on_device else 0
        of, count = self._all.of(start, stop), self.micro_batches
        return int(visit_bytes(phase, of, count, boundary, activation, scratch))

    def work_table(
        self,
        phase: Phase,
        boundary: Boundary,
        activation: Activation = "recompute",
        on_device: bool = False,
    ) -> NDArray[np.float64]:
        """Return `work_bytes` of all segments, `[start, stop]`; infinite where there is none."""
        scratch = self.device_scratch_bytes if on_device else 0
        table = visit_bytes(
            phase, self._all.table, self.micro_batches, boundary, activation, scratch
        )
        there = np.triu(np.ones(table.shape, bool), 1)
        return np.where(there, table, np.inf)

    @cached_property
    def saved_table(self) -> NDArray[np.float64]:
        """`saved_bytes` of all segments, `[start, stop]`; infinite where graphs cannot wait."""
        return self.micro_batches * self._all.saved_table

    @cached_property
    def sent_table(self) -> NDArray[np.float64]:
        """`sent_bytes` of all segments, `[start, stop]`; infinite where graphs cannot wait."""
        return self.micro_batches * self._all.sent_table

    def saved_bytes(self, start: int, stop: int) -> int:
        return self.micro_batches * self.saved.of(start, stop).n_bytes

    def sent_bytes(self, start: int, stop: int) -> int:
        """Return what all micro-batches send to the host if the segment is offloaded."""
        return self.micro_batches * self.saved.of(start, stop).sent_bytes

    def _waiting_bytes(self, shape: Shape) -> int:
        """Return the host's copies: of values for recomputing, of what is offloaded, and of values
        on their way from visit to visit."""
        needed: set[str] = set()
        offloaded = 0
        bounds, waiting = shape.backward_bounds, shape.waiting
        for start, stop in itertools.pairwise(bounds[:-1]):
            how = waiting.get((start, stop), "recompute")
            if how == "recompute":
                needed.update(self._chain.reads(start, stop))
            elif how == "offload":
                offloaded += self.saved.of(start, stop).sent_bytes
        if shape.boundary == "device":
            needed |= self._skipping(shape)
        needed.difference_update(self._chain.inputs)
        passing = 0
        if shape.boundary == "host":
            cuts = {*shape.forward_bounds, *bounds[:-1]}
            passing = max(self._all.crossing_bytes[cut] for cut in cuts)
        # Values and gradients at a cut, and one gradient that comes before the one above it goes.
        more = shape.segments > 2
        waiting_bytes = self._bytes(needed) + offloaded + 2 * passing
        return self.micro_batches * waiting_bytes + passing * more

    def _skipping(self, shape: Shape) -> set[str]:
        """Return values that a visit hands on, but not to the next one: they wait on the host even
        where others wait on the device."""
        visits = (v for v in training_visits(shape) if v.phase is not Phase.BACKWARD)
        upwards = [visit.layers for visit in visits]
        read = [set(self._chain.reads(*layers)) for layers in upwards]
        found: set[str] = set()
        for index, layers in enumerate(upwards):
            beyond = set[str]().union(*read[index + 2 :])
            found |= beyond.intersection(self._chain.writes(*layers))
        return found

    def _buffers_bytes(self) -> int:
        unique: dict[int, int] = {}
        before = 0
        for layer, cost in zip(self._chain.layers, self._costs.layers, strict=True):
            for buffer in layer.buffers.values():
                unique[id(buffer)] = buffer.numel() * buffer.element_size()
            before += cost.buffer_bytes * cost.changes_buffers
        return sum(unique.values()) + self.micro_batches * before

    def _bytes(self, names: Iterable[str]) -> int:
        return sum(self._costs.values[name].n_bytes for name in names)
