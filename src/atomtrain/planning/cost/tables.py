"""Bytes and seconds of one kind of visit to all segments at once, `[start, stop]`.

Bytes are sums over layers, and what shared weights add. A field of seconds is made when it is first
needed: most families of plans are compared by their bounds alone, which need little of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atomtrain.planning.cost.timeline import VisitTime
from atomtrain.planning.plan.layout import Layout
from atomtrain.planning.plan.machine import Machine
from atomtrain.planning.plan.shape import Activation, Boundary, Phase
from atomtrain.planning.plan.updating import ADAMW_BYTES, BlockUpdate

Array = NDArray[np.float64]
_NONE: frozenset[int] = frozenset()


class Moved(NamedTuple):
    """Sums over segments, `[start, stop]`."""

    segment: Array
    """Bytes in a slot."""
    coming: Array
    """Bytes of resident blocks that come from the host."""
    gradient: Array
    """Bytes in a gradient buffer."""
    leaving: Array
    """Bytes of the gradients of resident blocks that leave."""
    updated: Array
    """What the host updates, in AdamW parameters."""
    updated_there: Array
    """What the device updates, in its AdamW parameters."""
    seeds: Array
    """Bytes of gradients that come back to be added to."""


class Traffic:
    """Answers what visits move, by what is resident."""

    def __init__(self, layout: Layout, updated: Sequence[BlockUpdate], host_layers: int) -> None:
        self._layout, self._updated, self._first = layout, updated, host_layers
        self._moved: dict[tuple[frozenset[int], frozenset[int]], Moved] = {}
        self._largest: dict[frozenset[int], tuple[Array, Array]] = {}

    def moved(
        self,
        resident: frozenset[int],
        on_device: frozenset[int] = _NONE,
    ) -> Moved:
        key = resident, on_device
        if key not in self._moved:
            layout, count = self._layout, len(self._layout.layers)
            updates = self._updated[:count]
            here = [0.0 if b in on_device else u.host_work for b, u in enumerate(updates)]
            there = [u.device_work if b in on_device else 0.0 for b, u in enumerate(updates)]
            own = [layout.block_bytes(block) for block in range(count)]
            gradients = [layout.gradients.block_bytes(block) for block in range(count)]
            leaves = [block in resident and block not in on_device for block in range(count)]
            moved = Moved(
                segment=between([n * (block not in resident) for block, n in enumerate(own)]),
                coming=between([n * leaves[block] for block, n in enumerate(own)]),
                gradient=between([n * (b not in resident) for b, n in enumerate(gradients)]),
                leaving=between([n * leaves[block] for block, n in enumerate(gradients)]),
                updated=between(here),
                updated_there=between(there),
                seeds=np.zeros((count + 1, count + 1)),
            )
            for block in range(count, layout.blocks):
                moved = self._with_shared(moved, block, resident, on_device)
            self._moved[key] = moved
        return self._moved[key]

    def _with_shared(
        self,
        moved: Moved,
        block: int,
        resident: frozenset[int],
        on_device: frozenset[int],
    ) -> Moved:
        users, n_bytes = self._layout.users(block, self._first), self._layout.block_bytes(block)
        gradient_bytes = self._layout.gradients.block_bytes(block)
        if not users:
            return moved
        start, stop = np.indices(moved.segment.shape)
        used = np.zeros(moved.segment.shape, bool)
        for user in users:
            used |= (start <= user) & (user < stop)
        first = (start <= users[0]) & (users[0] < stop)
        work = self._updated[block]
        if block in on_device:
            return moved._replace(updated_there=moved.updated_there + work.device_work * first)
        moved = moved._replace(updated=moved.updated + work.host_work * first)
        if block in resident:
            return moved._replace(
                coming=moved.coming + n_bytes * first,
                leaving=moved.leaving + gradient_bytes * first,
            )
        return moved._replace(
            segment=moved.segment + n_bytes * used,
            gradient=moved.gradient + gradient_bytes * used,
            seeds=moved.seeds + gradient_bytes * (used & (users[-1] >= stop)),
        )

    def most_gradient_bytes(self, resident: frozenset[int], slot_bytes: int) -> int:
        wide = self._layout.gradient_factor
        if self._layout.gradients is self._layout:
            return wide * slot_bytes
        sizes, largest = self._largest_gradients(resident)
        fitting = int(np.searchsorted(sizes, slot_bytes, side="right"))
        return wide * int(largest[fitting - 1]) if fitting else 0

    def _largest_gradients(self, resident: frozenset[int]) -> tuple[Array, Array]:
        """Return all segments' bytes in increasing order, and the largest gradient up to each."""
        if resident not in self._largest:
            moved = self.moved(resident)
            start, stop = np.triu_indices(len(moved.segment), 1)
            sizes = moved.segment[start, stop]
            order = np.argsort(sizes)
            largest = np.maximum.accumulate(moved.gradient[start, stop][order])
            self._largest[resident] = sizes[order], largest
        return self._largest[resident]


def between(values: Sequence[float]) -> Array:
    """Return the sums of `values[start:stop]`, 0 where `stop` is not above `start`."""
    sums = np.concatenate(([0.0], np.cumsum(np.asarray(values, float))))
    between: Array = np.triu(sums[None, :] - sums[:, None])
    return between


class Offloaded(NamedTuple):
    """What each segment saves for backward in all micro-batches, `[start, stop]`."""

    n_bytes: Array
    storages: Array


class Offloading(NamedTuple):
    """What compute spends on offloading each segment in all micro-batches, measured,
    `[start, stop]`."""

    forward_s: Array
    backward_s: Array


@dataclass(frozen=True, kw_only=True)
class Basis:
    """What the tables of a search are made from."""

    machine: Machine
    micro_batches: int
    gradient_factor: int
    forward_s: Array
    """Compute of forward of all micro-batches, `[start, stop]`."""
    backward_s: Array
    """The same of recomputing and backward."""
    crossing: Array
    """Bytes of all micro-batches' values at each cut."""
    later: bool
    """Whether all updates come after the step."""
    readers: int
    """How many devices share the disk's rate to load parameters; 0: they are in memory."""
    offloaded: Callable[[], Offloaded]
    remade: Array
    """Bytes that backward of all micro-batches reads and writes to make again what was not sent,
    `[start, stop]`."""
    offloading: Offloading | None
    """`None`: it is estimated from storages and from what is made again."""


class VisitTable:
    """The fields of `VisitTime` for all segments: `[start, stop]`, float64."""

    def __init__(
        self,
        basis: Basis,
        moved: Moved,
        phase: Phase,
        boundary: Boundary,
        *,
        load: bool,
        activation: Activation,
    ) -> None:
        """`moved`: what visits move. Other arguments as for `Costing.table`."""
        self._basis, self._machine, self._moved = basis, basis.machine, moved
        self._phase, self._boundary = phase, boundary
        self._backward = phase in (Phase.TURN, Phase.BACKWARD)
        self._load, self._activation = load, activation
        self._waits = activation != "recompute"
        # In backward both directions of the link are busy.
        self._share = basis.machine.both_ways_share if self._backward else 1.0

    def at(self, start: int, stop: int) -> VisitTime:
        """Return the seconds of the visit to one segment."""
        fields = (getattr(self, name) for name in VisitTime._fields)
        return VisitTime(*(float(column[start, stop]) for column in fields))

    @cached_property
    def load_s(self) -> Array:
        return _copied_s(
            self._loaded, self._share * self._machine.load_bytes_per_s, self._machine.copy_s
        )

    @cached_property
    def stage_s(self) -> Array:
        """Seconds in which what is loaded is read from disk."""
        readers = self._basis.readers
        if not readers:
            return self._nothing
        read_rate, _ = self._machine.storage_rates
        # In backward the disk reads and writes at once.
        share = self._machine.storage_both_ways_share if self._backward else 1.0
        return readers * self._loaded / (share * read_rate)

    @cached_property
    def loading_s(self) -> Array:
        """How long the loads take: the slower of disk and link."""
        lasting: Array = np.maximum(self.load_s, self.stage_s)
        return lasting

    @cached_property
    def unload_s(self) -> Array:
        rate = self._share * self._machine.unload_bytes_per_s
        return _copied_s(self._unloaded, rate, self._machine.copy_s)

    @cached_property
    def update_s(self) -> Array:
        """Seconds of the host's updates, unless they all come after the step."""
        return self._nothing if self._basis.later else self._updates_s

    @cached_property
    def later_s(self) -> Array:
        """Seconds of the host's updates if they all come after the step."""
        return self._updates_s if self._basis.later else self._nothing

    @property
    def _updates_s(self) -> Array:
        updates_s: Array = self._updated / self._machine.update_parameters_per_s
        return updates_s

    @cached_property
    def return_s(self) -> Array:
        """Seconds in which what was offloaded comes back."""
        if not (self._backward and self._activation == "offload"):
            return self._nothing
        away = self._basis.offloaded()
        back_s: Array = away.n_bytes / (self._share * self._machine.load_bytes_per_s)
        return back_s + self._machine.copy_s * away.storages

    @cached_property
    def fetch_s(self) -> Array:
        """Seconds of values and of what comes back on the link."""
        # At least one copy for each micro-batch.
        each_s = self._basis.micro_batches * self._machine.copy_s
        return _copied_s(self._values[0], self._machine.load_bytes_per_s, each_s) + self.return_s

    @cached_property
    def save_s(self) -> Array:
        """Seconds of values and of what is offloaded on the link."""
        machine = self._machine
        each_s = self._basis.micro_batches * machine.copy_s
        save_s = _copied_s(self._values[1], machine.unload_bytes_per_s, each_s)
        if self._activation == "offload" and not self._backward:
            away = self._basis.offloaded()
            save_s = save_s + away.n_bytes / machine.unload_bytes_per_s
            save_s = save_s + machine.copy_s * away.storages
        return save_s

    @cached_property
    def compute_s(self) -> Array:
        """Seconds of compute, with what it loses to other work of its processor."""
        basis, machine, moved = self._basis, self._machine, self._moved
        compute_s = basis.backward_s if self._backward else basis.forward_s
        if self._waits and self._backward:
            compute_s = np.maximum(compute_s - basis.forward_s, 0.0)
        if self._backward:
            compute_s = compute_s + (
                basis.gradient_factor * moved.seeds / machine.load_bytes_per_s
                + moved.updated_there / machine.device_update_rate
            )
        fetched, saved = self._values
        copied = self._loaded + self._unloaded + fetched + saved
        compute_s = compute_s + (
            basis.micro_batches * machine.visit_s
            + machine.compute_s_per_copied_byte * copied
            + machine.compute_s_per_update * self._updated
        )
        if self._activation == "offload":
            away = basis.offloaded()
            compute_s = compute_s + machine.compute_s_per_offloaded_byte * away.n_bytes
            if basis.offloading is not None:  # with the copies beside it
                measured = basis.offloading
                return compute_s + (measured.backward_s if self._backward else measured.forward_s)
            compute_s = compute_s + (
                machine.compute_s_per_copied_byte * away.n_bytes
                + machine.compute_s_per_offloaded_storage * away.storages
            )
            if self._backward:  # at the rate at which the device passes over memory in an update
                compute_s = compute_s + basis.remade / (ADAMW_BYTES * machine.device_update_rate)
        return compute_s

    @cached_property
    def visit_s(self) -> Array:
        lasting: Array = np.maximum(self.compute_s, np.maximum(self.fetch_s, self.save_s))
        return lasting

    @cached_property
    def _nothing(self) -> Array:
        return np.zeros_like(self._moved.segment)

    @cached_property
    def _loaded(self) -> Array:
        if not self._load:
            return self._nothing
        # Resident blocks come with the first of their users or in pieces with all layers up to it;
        # their gradients leave with it.
        if self._phase is Phase.BACKWARD:
            return self._moved.segment
        return self._moved.segment + self._moved.coming

    @cached_property
    def _unloaded(self) -> Array:
        if not self._backward:
            return self._nothing
        return self._basis.gradient_factor * (self._moved.gradient + self._moved.leaving)

    @property
    def _updated(self) -> Array:
        return self._moved.updated if self._backward else self._nothing

    @cached_property
    def _values(self) -> tuple[Array, Array]:
        """Bytes of values and their gradients that are fetched and saved.

        In forward the cut above counts as if backward had a cut there too, which a finer forward
        partition only has at some of them.
        """
        crossing = self._basis.crossing
        below, above = np.meshgrid(crossing, crossing, indexing="ij")
        on_host = self._boundary == "host"
        if self._phase in (Phase.FORWARD, Phase.EVALUATE):
            return below * on_host, above
        if self._phase is Phase.TURN:
            return below * on_host, below * on_host
        return below * (not self._waits) + above * on_host, below * on_host


def _copied_s(n_bytes: Array, bytes_per_s: float, start_s: float) -> Array:
    copied_s: Array = n_bytes / bytes_per_s
    return copied_s + start_s * (n_bytes > 0) if start_s else copied_s
