"""Seconds of each visit on each stream, from the costs of layers and the rates of a machine.

Every figure of a visit depends on its own layers and on what is resident, and on nothing else of
the plan: that is what lets the search build plans from their ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atomtrain.analysis.chain import Chain
from atomtrain.analysis.costs import ChainCosts
from atomtrain.analysis.profile import LayerTime
from atomtrain.errors import PlanError
from atomtrain.planning.disk import (
    DiskUse,
    OnDisk,
    States,
    disk_use,
)
from atomtrain.planning.layout import Layout
from atomtrain.planning.machine import Machine
from atomtrain.planning.saved import SavedTensors
from atomtrain.planning.schedule import Phase, Visit, training_visits
from atomtrain.planning.shape import Activation, Boundary, Shape
from atomtrain.planning.timeline import DiskWork, Span, StepTime, VisitTime, predict, step_spans
from atomtrain.planning.updating import UpdateModel, two_moments

Array = NDArray[np.float64]


class Place(NamedTuple):
    """What of a shape the seconds of its visits depend on."""

    resident: frozenset[int]
    boundary: Boundary
    on_device: frozenset[int] = frozenset()
    """Those of the resident blocks that are updated on the device."""


class _Moved(NamedTuple):
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


@dataclass(frozen=True)
class VisitTable:
    """The fields of `VisitTime` for all segments at once: `[start, stop]`, float64."""

    compute_s: Array
    load_s: Array
    unload_s: Array
    update_s: Array
    fetch_s: Array
    save_s: Array
    stage_s: Array

    @cached_property
    def loading_s(self) -> Array:
        """How long the loads take: the slower of disk and link."""
        lasting: Array = np.maximum(self.load_s, self.stage_s)
        return lasting

    return_s: Array

    @cached_property
    def visit_s(self) -> Array:
        """How long the visits last."""
        lasting: Array = np.maximum(self.compute_s, np.maximum(self.fetch_s, self.save_s))
        return lasting

    def at(self, start: int, stop: int) -> VisitTime:
        """Return the seconds of the visit to one segment."""
        fields = (getattr(self, name) for name in VisitTime._fields)
        return VisitTime(*(float(column[start, stop]) for column in fields))


class Costing:
    """Answers how long visits, and whole steps, take."""

    def __init__(
        self,
        chain: Chain,
        costs: ChainCosts,
        times: Mapping[str, LayerTime],
        machine: Machine,
        layout: Layout,
        micro_batches: int,
        host_layers: int = 0,
        disk: DiskUse | None = None,
        clips: bool = False,
        updates: UpdateModel | None = None,
    ) -> None:
        """`times` are for one micro-batch, by kind of layer; leading layers may be on the host.

        Part of the state may be on disk. Its bytes are those of the same chain. With that and
        clipping no update begins before all gradients have arrived: they go on in the next forward.
        `updates` says what the optimizer takes; `None` is AdamW.

        Raises:
            PlanError: a time is missing, negative or no number.
        """
        per_layer = [_checked(times, cost.kind, cost.name) for cost in costs.layers]
        self.machine, self._layout, self._first = machine, layout, host_layers
        self.micro_batches = micro_batches
        self.layer_forward_s = [micro_batches * time.forward_s for time in per_layer]
        self.layer_backward_s = [micro_batches * time.backward_s for time in per_layer]
        cuts = range(len(chain.layers) + 1)
        crossing = [sum(costs.values[n].n_bytes for n in chain.crossing(cut)) for cut in cuts]
        self._crossing = micro_batches * np.array(crossing, float)
        self._updated = (updates or two_moments(chain)).of_blocks(chain, layout)
        self._disk = disk if disk is not None and disk.on_disk else None
        self.disk = None if self._disk is None else self._disk_work(self._disk, clips)
        """What updates take where state is on disk."""
        self._moved: dict[tuple[frozenset[int], frozenset[int]], _Moved] = {}
        self._tables: dict[tuple[Phase, Place, bool, Activation], VisitTable] = {}
        self._chain, self._costs = chain, costs

    def step(self, shape: Shape) -> StepTime:
        """Return the predicted step of a shape."""
        visits = training_visits(shape)
        return predict(visits, self.visit_times(shape, visits), self.disk)

    def spans(self, shape: Shape) -> list[Span]:
        """Return the spans of the predicted step of a shape."""
        visits = training_visits(shape)
        return step_spans(visits, self.visit_times(shape, visits), self.disk)

    def visit_times(self, shape: Shape, visits: Sequence[Visit]) -> list[VisitTime]:
        """Return the seconds of each visit of a shape."""
        resident, on_device = frozenset(shape.resident_blocks), frozenset(shape.device_blocks)
        place = Place(resident, shape.boundary, on_device)
        times = []
        for visit in visits:
            table = self.table(visit.phase, place, load=visit.load, activation=visit.activation)
            times.append(table.at(*visit.layers))
        return times

    def segment_bytes(self, resident: frozenset[int]) -> Array:
        """Return the slot bytes of all segments, `[start, stop]`."""
        return self._moved_by(resident, frozenset()).segment

    def table(
        self, phase: Phase, place: Place, *, load: bool, activation: Activation = "recompute"
    ) -> VisitTable:
        """Return the seconds of a visit to each segment.

        Args:
            phase: Forward, turn or backward.
            place: What is resident, and where values wait.
            load: Whether the segment is loaded.
            activation: What happens to what forward saves; nothing else than `recompute` in turn.
        """
        key = (phase, place, load, activation)
        if key not in self._tables:
            self._tables[key] = self._table(*key)
        return self._tables[key]

    def _table(self, phase: Phase, place: Place, load: bool, activation: Activation) -> VisitTable:
        machine = self.machine
        backward = phase in (Phase.TURN, Phase.BACKWARD)
        moved = self._moved_by(place.resident, place.on_device)
        nothing = np.zeros_like(moved.segment)
        compute_s = _between(self.layer_backward_s if backward else self.layer_forward_s)
        waits = activation != "recompute"
        if waits and backward:
            compute_s = np.maximum(compute_s - _between(self.layer_forward_s), 0.0)
        # Resident blocks come with the first of their users, and their gradients leave with it.
        coming = moved.coming if phase is not Phase.BACKWARD else 0
        loaded = moved.segment + coming if load else nothing
        wide = self._layout.gradient_factor
        unloaded = wide * (moved.gradient + moved.leaving) if backward else nothing
        updated = moved.updated if backward else nothing
        if backward:
            compute_s = compute_s + wide * moved.seeds / machine.load_bytes_per_s
            compute_s = compute_s + moved.updated_there / machine.device_update_rate
        compute_s = compute_s + self.micro_batches * machine.visit_s
        fetched, saved = self._moved_bytes(phase, place.boundary, waits)
        away, moves = self._offloaded if activation == "offload" else (nothing, nothing)
        left, left_moves = (nothing, nothing) if backward else (away, moves)
        returned, return_moves = (away, moves) if backward else (nothing, nothing)
        copied = loaded + unloaded + fetched + saved + away
        # In backward both directions of the link are busy.
        share = machine.both_ways_share if backward else 1.0
        each_s = self.micro_batches * machine.copy_s
        later = self.disk is not None and self.disk.clips
        load_rate = machine.load_bytes_per_s
        unload_rate = machine.unload_bytes_per_s
        return_s = returned / (share * load_rate) + machine.copy_s * return_moves
        return VisitTable(
            compute_s=compute_s
            + machine.compute_s_per_copied_byte * copied
            + machine.compute_s_per_update * updated,
            load_s=_copied_s(loaded, share * load_rate, machine.copy_s),
            unload_s=_copied_s(unloaded, share * unload_rate, machine.copy_s),
            update_s=nothing if later else updated / machine.update_parameters_per_s,
            # At least one copy for each micro-batch.
            fetch_s=_copied_s(fetched, load_rate, each_s) + return_s,
            save_s=_copied_s(saved, unload_rate, each_s)
            + left / unload_rate
            + machine.copy_s * left_moves,
            stage_s=self._stage_s(backward, loaded),
            return_s=return_s,
        )

    def most_gradient_bytes(self, resident: frozenset[int], slot_bytes: int) -> int:
        """Return the largest gradients of the segments that fit a slot."""
        wide = self._layout.gradient_factor
        if self._layout.gradients is self._layout:
            return wide * slot_bytes
        moved = self._moved_by(resident, frozenset())
        fitting = np.triu(moved.segment <= slot_bytes, 1)
        return wide * int(moved.gradient[fitting].max(initial=0))

    @cached_property
    def _offloaded(self) -> tuple[Array, Array]:
        """Return the bytes that each segment saves for backward, and in how many storages."""
        saved, count = SavedTensors(self._chain, self._costs), len(self._costs.layers)
        n_bytes, storages = np.zeros((2, count + 1, count + 1))
        for start in range(count):
            for stop in range(start + 1, count + 1):
                of = saved.of(start, stop)
                n_bytes[start, stop], storages[start, stop] = of.n_bytes, of.storages
        return self.micro_batches * n_bytes, self.micro_batches * storages

    def _moved_by(self, resident: frozenset[int], on_device: frozenset[int]) -> _Moved:
        """Return what visits to all segments load, unload and update."""
        key = resident, on_device
        if key not in self._moved:
            layout, count = self._layout, len(self._layout.layers)
            updates = self._updated[:count]
            here = [0.0 if b in on_device else u.host_work for b, u in enumerate(updates)]
            there = [u.device_work if b in on_device else 0.0 for b, u in enumerate(updates)]
            own = [layout.block_bytes(block) for block in range(count)]
            gradients = [layout.gradients.block_bytes(block) for block in range(count)]
            comes = [block in resident and block not in on_device for block in range(count)]
            moved = _Moved(
                segment=_between([n * (block not in resident) for block, n in enumerate(own)]),
                coming=_between([n * comes[block] for block, n in enumerate(own)]),
                gradient=_between([n * (b not in resident) for b, n in enumerate(gradients)]),
                leaving=_between([n * comes[block] for block, n in enumerate(gradients)]),
                updated=_between(here),
                updated_there=_between(there),
                seeds=np.zeros((count + 1, count + 1)),
            )
            for block in range(count, layout.blocks):
                moved = self._with_shared(moved, block, resident, on_device)
            self._moved[key] = moved
        return self._moved[key]

    def _with_shared(
        self, moved: _Moved, block: int, resident: frozenset[int], on_device: frozenset[int]
    ) -> _Moved:
        """Return the sums with what a shared weight adds to them."""
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

    def _disk_work(self, use: DiskUse, clips: bool) -> DiskWork:
        """Return what all updates take."""
        read_rate, write_rate = self.machine.storage_rates
        share, n_bytes = self.machine.storage_both_ways_share, sum(map(sum, use.blocks))
        # In backward parameters are read for the device too.
        loads = sum(block.parameters for block in use.blocks)
        worked = sum(block.host_work for block in self._updated)
        return DiskWork(
            read_s=(n_bytes + loads * (not clips)) / (share * read_rate),
            update_s=worked / self.machine.update_parameters_per_s,
            write_s=n_bytes / (share * write_rate),
            ahead_s=sum(use.slots) / read_rate,
            blocks=sum(1 for block in use.blocks if sum(block)),
            clips=clips,
        )

    def _stage_s(self, backward: bool, loaded: Array) -> Array:
        """Return the seconds in which what visits load is read from disk."""
        if self._disk is None or "parameters" not in self._disk.on_disk:
            return np.zeros_like(loaded)
        read_rate, _ = self.machine.storage_rates
        # In backward the disk reads and writes at once.
        share = self.machine.storage_both_ways_share if backward else 1.0
        return loaded / (share * read_rate)

    def _moved_bytes(self, phase: Phase, boundary: Boundary, waits: bool) -> tuple[Array, Array]:
        """Return what visits fetch and save of values and their gradients.

        In forward the cut above counts as if backward had a cut there too, which a finer forward
        partition only has at some of them.
        """
        below, above = np.meshgrid(self._crossing, self._crossing, indexing="ij")
        on_host = boundary == "host"
        if phase in (Phase.FORWARD, Phase.EVALUATE):
            return below * on_host, above
        if phase is Phase.TURN:
            return below * on_host, below * on_host
        return below * (not waits) + above * on_host, below * on_host


def _copied_s(n_bytes: Array, bytes_per_s: float, start_s: float) -> Array:
    """Return the seconds of copies, with what they take beside their bytes."""
    return n_bytes / bytes_per_s + start_s * (n_bytes > 0)


def spans_of(
    shape: Shape,
    chain: Chain,
    costs: ChainCosts,
    times: Mapping[str, LayerTime],
    machine: Machine,
    micro_batches: int,
    states: States | None = None,
    on_disk: OnDisk = (),
    clips: bool = False,
    updates: UpdateModel | None = None,
) -> list[Span]:
    """Return the predicted spans of one step of a plan's `shape`."""
    layout = Layout(chain)
    disk = disk_use(chain, layout, states or {}, on_disk)
    first = shape.host_layers
    costing = Costing(
        chain, costs, times, machine, layout, micro_batches, first, disk, clips, updates
    )
    return costing.spans(shape)


def _checked(times: Mapping[str, LayerTime], kind: str, name: str) -> LayerTime:
    if kind not in times:
        raise PlanError(f"there is no time for layer {name!r} (kind {kind!r}); profile it first")
    time = times[kind]
    for seconds in time:
        if not (seconds >= 0 and math.isfinite(seconds)):
            raise PlanError(
                f"the time of layer {name!r} is {seconds} s; it must be at least 0 and finite"
            )
    return time


def _between(values: Sequence[float]) -> Array:
    """Return the sums of `values[start:stop]`, 0 where `stop` is not above `start`."""
    sums = np.concatenate(([0.0], np.cumsum(np.asarray(values, float))))
    between: Array = np.triu(sums[None, :] - sums[:, None])
    return between
