"""Seconds of each visit on each stream, from the costs of layers and the rates of a machine.

Every figure of a visit depends on its own layers and on what is resident, and on nothing else of
the plan: that is what lets the search build plans from their ends.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atomtrain.analysis.costs.costs import ChainCosts
from atomtrain.analysis.costs.profile import LayerTime
from atomtrain.analysis.layers.chain import Chain
from atomtrain.errors import PlanError
from atomtrain.planning.cost.host import HostTime, host_time, without
from atomtrain.planning.cost.segments import Segments, segments_of, sending_all
from atomtrain.planning.cost.tables import (
    Basis,
    Offloaded,
    Offloading,
    Traffic,
    VisitTable,
    between,
)
from atomtrain.planning.cost.timeline import (
    DiskWork,
    Span,
    StepTime,
    VisitTime,
    label_of_layers,
    step_spans,
    step_time,
)
from atomtrain.planning.plan.disk import DiskUse, States, disk_use
from atomtrain.planning.plan.layout import Layout
from atomtrain.planning.plan.machine import Machine
from atomtrain.planning.plan.plan import Plan
from atomtrain.planning.plan.shape import Activation, Boundary, Phase, Shape, Visit, training_visits
from atomtrain.planning.plan.updating import UpdateModel, two_moments

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Given:
    """A model on a machine: what plans are made from."""

    chain: Chain
    costs: ChainCosts
    """Of its layers, for one micro-batch."""
    times: Mapping[str, LayerTime]
    """Of each kind of layer, for one micro-batch."""
    machine: Machine

    def sending_all(self) -> Given:
        chain, costs = sending_all(self.chain, self.costs)
        times = {kind: time.sending_all() for kind, time in self.times.items()}
        return Given(chain=chain, costs=costs, times=times, machine=self.machine)


class Place(NamedTuple):
    """What of a shape the seconds of its visits depend on."""

    resident: frozenset[int]
    boundary: Boundary
    on_device: frozenset[int] = frozenset()
    """Those of the resident blocks that are updated on the device."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What all steps are like, whatever their plan."""

    micro_batches: int
    host_layers: int = 0
    """Leading layers that are not the device's."""
    disk: DiskUse | None = None
    """Which state is on disk, of the same chain; `None`: nothing."""
    clips: bool = False
    """Whether no update begins before all gradients have arrived; they go on in the next
    forward."""
    updates: UpdateModel | None = None
    """What the optimizer takes; `None` is AdamW."""
    spends: bool = False
    """Whether gradients share staging buffers on the host. The search takes no account of what
    waits for these; the times of the plan that it finds do."""


class Costing:
    """Answers how long visits, and whole steps, take."""

    def __init__(self, given: Given, steps: Steps) -> None:
        """`steps` are those of the given chain.

        Raises:
            PlanError: a time is missing, negative or no number.
        """
        chain, costs, machine = given.chain, given.costs, given.machine
        micro_batches, disk = steps.micro_batches, steps.disk
        per_layer = [_checked(given.times, cost.kind, cost.name) for cost in costs.layers]
        self.machine, self.micro_batches = machine, micro_batches
        self.layer_forward_s = [micro_batches * time.forward_s for time in per_layer]
        self.layer_backward_s = [micro_batches * time.backward_s for time in per_layer]
        self._segments = segments_of(chain, costs)
        layout = self._segments.layout
        updates = steps.updates or two_moments(chain)
        self._updated = updates.of_blocks(chain, layout)
        self._host_only = {
            block for block in range(layout.blocks) if not layout.users(block, steps.host_layers)
        }
        on_disk = disk.on_disk if disk is not None else ()
        self._disk, self._clips = disk if on_disk else None, steps.clips
        self._spends = steps.spends
        self.traffic = Traffic(layout, self._updated, steps.host_layers)
        """What visits move."""
        self._sizes: dict[frozenset[int], Array] = {}
        self._tables: dict[tuple[Phase, Place, bool, Activation], VisitTable] = {}
        self._basis = Basis(
            machine=machine,
            micro_batches=micro_batches,
            gradient_factor=layout.gradient_factor,
            forward_s=between(self.layer_forward_s),
            backward_s=between(self.layer_backward_s),
            crossing=micro_batches * np.array(self._segments.crossing_bytes, float),
            later=steps.clips,
            readers=disk.readers if disk is not None and "parameters" in on_disk else 0,
            offloaded=functools.cache(functools.partial(_offloaded, self._segments, micro_batches)),
            remade=micro_batches * between([c.saved.remade_traffic_bytes for c in costs.layers]),
            offloading=_offloading(costs, per_layer, micro_batches),
        )

    def step(self, shape: Shape) -> StepTime:
        return step_time(self.spans(shape))

    def spans(self, shape: Shape) -> list[Span]:
        visits = training_visits(shape)
        times, disk = self.visit_times(shape, visits), self.disk_work(shape.device_blocks)
        return step_spans(visits, times, disk, spends=self._spends)

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
        """Return the slot bytes of all segments, `[start, stop]`; infinite where there is none."""
        if resident not in self._sizes:
            sizes = self.traffic.moved(resident).segment
            self._sizes[resident] = np.where(np.triu(np.ones(sizes.shape, bool), 1), sizes, np.inf)
        return self._sizes[resident]

    def table(
        self, phase: Phase, place: Place, *, load: bool, activation: Activation = "recompute"
    ) -> VisitTable:
        """Return the seconds of a visit to each segment.

        Args:
            place: What is resident, and where values wait.
            activation: What happens to what forward saves; nothing else than `recompute` in turn.
        """
        key = (phase, place, load, activation)
        if key not in self._tables:
            moved = self.traffic.moved(place.resident, place.on_device)
            self._tables[key] = VisitTable(
                self._basis, moved, phase, place.boundary, load=load, activation=activation
            )
        return self._tables[key]

    def disk_work(self, on_device: Collection[int] = ()) -> DiskWork | None:
        """Return what all updates take, if they go on in the next forward or state is on disk.

        Args:
            on_device: Blocks that are updated on the device, when their gradients are complete.
        """
        use, clips = self._disk, self._clips
        others = self._host_only.union(on_device)
        host = (b.host_work for i, b in enumerate(self._updated) if i not in others)
        update_s = sum(host) / self.machine.update_parameters_per_s
        if use is None:
            if not clips:
                return None
            return DiskWork(0.0, update_s, 0.0, ahead_s=0.0, blocks=0, clips=True)
        read_rate, write_rate = self.machine.storage_rates
        share, n_bytes = self.machine.storage_both_ways_share, sum(map(sum, use.blocks))
        # In backward parameters are read for the device too.
        loads = use.readers * sum(block.parameters for block in use.blocks)
        return DiskWork(
            read_s=(n_bytes + loads * (not clips)) / (share * read_rate),
            update_s=update_s,
            write_s=n_bytes / (share * write_rate),
            ahead_s=sum(use.slots) / read_rate,
            blocks=sum(1 for block in use.blocks if sum(block)),
            clips=clips,
        )


def spans_of(
    plan: Plan,
    given: Given,
    *,
    states: States | None = None,
    clips: bool = False,
    updates: UpdateModel | None = None,
    devices: int = 1,
) -> list[Span]:
    """Return the predicted spans of one step of a plan.

    Args:
        states: The optimizer's state of each parameter, if part of it is on disk.
        devices: How many run the plan, and read what is on disk.
    """
    if not plan.remakes:
        given = given.sending_all()
    chain, costs, count = given.chain, given.costs, plan.host_layers
    layout, rest = Layout(chain), without(chain, costs, count).chain
    steps = Steps(
        micro_batches=plan.micro_batches,
        host_layers=count,
        disk=disk_use(rest, Layout(rest), states or {}, plan.on_disk, devices),
        clips=clips,
        updates=updates,
        spends=plan.spends,
    )
    spans = Costing(given, steps).spans(plan.shape)
    if not count:
        return spans
    disk = disk_use(chain, layout, states or {}, plan.on_disk, devices)
    aside = host_time(
        chain, costs, count, given.machine, plan.micro_batches, disk, updates or two_moments(chain)
    )
    return _with_host(spans, aside, count)


def _with_host(spans: Sequence[Span], aside: HostTime, host_layers: int) -> list[Span]:
    """Return the spans of a step with those of its layers on the host: the device waits for their
    forward, and the next step for their update."""
    begun_s = aside.forward_s
    later = [s._replace(start_s=s.start_s + begun_s, end_s=s.end_s + begun_s) for s in spans]
    ends_s = max(span.end_s for span in later)
    forward, backward = (
        label_of_layers(phase, (0, host_layers)) for phase in (Phase.FORWARD, Phase.BACKWARD)
    )
    return [
        Span("update", forward, 0.0, begun_s),
        *later,
        Span("update", backward, ends_s, ends_s + aside.backward_s),
    ]


def _offloaded(segments: Segments, micro_batches: int) -> Offloaded:
    """Return what each segment sends to the host."""
    return Offloaded(micro_batches * segments.sent_bytes, micro_batches * segments.sent_storages)


def _offloading(
    costs: ChainCosts, times: Sequence[LayerTime], micro_batches: int
) -> Offloading | None:
    """Return what compute spends on offloading each segment, if each layer that can was measured;
    the last one never is offloaded."""
    forward_s, backward_s = [], []
    for index, (cost, time) in enumerate(zip(costs.layers, times, strict=True)):
        able = cost.saved.movable and index + 1 < len(times)
        if able and (time.offload_forward_s is None or time.offload_backward_s is None):
            return None
        forward_s.append(micro_batches * (time.offload_forward_s or 0.0))
        backward_s.append(micro_batches * (time.offload_backward_s or 0.0))
    return Offloading(between(forward_s), between(backward_s))


def _checked(times: Mapping[str, LayerTime], kind: str, name: str) -> LayerTime:
    if kind not in times:
        raise PlanError(f"there is no time for layer {name!r} (kind {kind!r}); profile it first")
    time = times[kind]
    for seconds in time.known:
        if not (seconds >= 0 and math.isfinite(seconds)):
            raise PlanError(
                f"the time of layer {name!r} is {seconds} s; it must be at least 0 and finite"
            )
    return time
