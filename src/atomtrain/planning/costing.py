"""Seconds of each visit on each stream, from the costs of layers and the rates of a machine.

Every figure of a visit depends on its own layers and on what is resident, and on nothing else of
the plan: that is what lets the search build plans from their ends.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from atomtrain.analysis.chain import Chain
from atomtrain.analysis.costs import ChainCosts
from atomtrain.analysis.profile import LayerTime
from atomtrain.errors import PlanError
from atomtrain.planning.layout import Layout
from atomtrain.planning.machine import Machine
from atomtrain.planning.schedule import Phase, Visit, training_visits
from atomtrain.planning.shape import Boundary, Shape
from atomtrain.planning.timeline import Span, StepTime, VisitTime, predict, step_spans


class Place(NamedTuple):
    """What of a shape the seconds of its visits depend on."""

    resident: frozenset[int]
    boundary: Boundary


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
    ) -> None:
        """`times` are for one micro-batch, by kind of layer.

        Raises:
            PlanError: a time is missing, negative or no number.
        """
        per_layer = [_checked(times, cost.kind, cost.name) for cost in costs.layers]
        self._chain, self._costs = chain, costs
        self._machine, self._layout = machine, layout
        self.micro_batches = micro_batches
        self._forward_s = _prefixes([micro_batches * time.forward_s for time in per_layer])
        self._backward_s = _prefixes([micro_batches * time.backward_s for time in per_layer])
        self._crossing = [
            sum(costs.values[name].n_bytes for name in chain.crossing(cut))
            for cut in range(len(chain.layers) + 1)
        ]

    @cached_property
    def _updated(self) -> list[int]:
        """Trainable parameters of each block."""
        counts = [0] * self._layout.blocks
        shared = {
            weight.start_bytes: len(self._layout.layers) + index
            for index, weight in enumerate(self._layout.shared)
        }
        for parameter in self._chain.parameters:
            users = self._chain.users[id(parameter)]
            at = self._layout.offsets[id(parameter)]
            block = users[0] if len(users) == 1 else shared[at]
            counts[block] += parameter.numel() if parameter.requires_grad else 0
        return counts

    def step(self, shape: Shape) -> StepTime:
        """Return the predicted step of a shape."""
        visits = training_visits(shape)
        return predict(visits, self.visit_times(shape, visits))

    def spans(self, shape: Shape) -> list[Span]:
        """Return the spans of the predicted step of a shape."""
        visits = training_visits(shape)
        return step_spans(visits, self.visit_times(shape, visits))

    def visit_times(self, shape: Shape, visits: Sequence[Visit]) -> list[VisitTime]:
        """Return the seconds of each visit of a shape."""
        place = Place(frozenset(shape.resident_blocks), shape.boundary)
        return [
            self.visit_time(v.phase, *v.layers, place, load=v.load, keep=v.keep) for v in visits
        ]

    def visit_time(
        self, phase: Phase, start: int, stop: int, place: Place, *, load: bool, keep: bool = False
    ) -> VisitTime:
        """Return the seconds of one visit.

        Args:
            phase: Forward, turn or backward.
            start: The segment's first layer.
            stop: The layer after its last one.
            place: What is resident, and where values wait.
            load: Whether the segment is loaded.
            keep: Whether its graphs wait for backward.
        """
        machine = self._machine
        backward = phase in (Phase.TURN, Phase.BACKWARD)
        segment = self._layout.segment_bytes(start, stop, place.resident)
        # In backward both directions of the link are busy.
        share = machine.both_ways_share if backward else 1.0
        compute_s = self._compute_s(phase, start, stop, keep)
        load_bytes = unload_bytes = updated = 0
        if load:
            load_bytes = segment
            if phase is not Phase.BACKWARD:
                load_bytes += self._resident_bytes(start, stop, place.resident)
        if backward:
            unload_bytes = segment + self._resident_bytes(start, stop, place.resident)
            updated = sum(
                self._updated[block]
                for block in self._layout.blocks_of(start, stop)
                if start <= self._layout.users(block)[0]
            )
            compute_s += self._seed_bytes(start, stop, place.resident) / machine.load_bytes_per_s
        fetched, saved = self._moved_bytes(phase, start, stop, place.boundary, keep)
        copied = load_bytes + unload_bytes + fetched + saved
        compute_s += self.micro_batches * machine.visit_s
        compute_s += machine.compute_s_per_copied_byte * copied
        compute_s += machine.compute_s_per_update * updated
        each_s = self.micro_batches * machine.copy_s
        return VisitTime(
            compute_s=compute_s,
            load_s=_copied_s(load_bytes, share * machine.load_bytes_per_s, machine.copy_s),
            unload_s=_copied_s(unload_bytes, share * machine.unload_bytes_per_s, machine.copy_s),
            update_s=updated / machine.update_parameters_per_s,
            # At least one copy for each micro-batch.
            fetch_s=_copied_s(fetched, machine.load_bytes_per_s, each_s),
            save_s=_copied_s(saved, machine.unload_bytes_per_s, each_s),
        )

    def _compute_s(self, phase: Phase, start: int, stop: int, keep: bool) -> float:
        forward_s = self._forward_s[stop] - self._forward_s[start]
        if phase in (Phase.FORWARD, Phase.EVALUATE):
            return forward_s
        backward_s = self._backward_s[stop] - self._backward_s[start]
        return max(0.0, backward_s - forward_s) if keep else backward_s

    def _resident_bytes(self, start: int, stop: int, resident: Collection[int]) -> int:
        """Return the resident blocks that come with the segment: its layers are the first users.

        In backward they are the last users, so their gradients leave with the segment.
        """
        return sum(
            self._layout.block_bytes(block)
            for block in resident
            if start <= self._layout.users(block)[0] < stop
        )

    def _seed_bytes(self, start: int, stop: int, resident: Collection[int]) -> int:
        """Return the gradients of shared weights that come back for the segment to add to."""
        n_bytes = 0
        for block in self._layout.blocks_of(start, stop)[stop - start :]:
            if block not in resident and self._layout.users(block)[-1] >= stop:
                n_bytes += self._layout.block_bytes(block)
        return n_bytes

    def _moved_bytes(
        self, phase: Phase, start: int, stop: int, boundary: Boundary, keep: bool
    ) -> tuple[int, int]:
        """Return what a visit fetches and saves of values and their gradients.

        In forward the cut above counts as if backward had a cut there too, which a finer forward
        partition only has at some of them.
        """
        below = self.micro_batches * self._crossing[start]
        above = self.micro_batches * self._crossing[stop]
        on_host = boundary == "host"
        if phase in (Phase.FORWARD, Phase.EVALUATE):
            return below * on_host, above
        if phase is Phase.TURN:
            return below * on_host, below * on_host
        return below * (not keep) + above * on_host, below * on_host


def _copied_s(n_bytes: int, bytes_per_s: float, start_s: float) -> float:
    """Return the seconds of copies, with what they take beside their bytes."""
    return n_bytes / bytes_per_s + start_s * (n_bytes > 0)


def spans_of(
    shape: Shape,
    chain: Chain,
    costs: ChainCosts,
    times: Mapping[str, LayerTime],
    machine: Machine,
    micro_batches: int,
) -> list[Span]:
    """Return the predicted spans of one step of a plan's `shape`."""
    costing = Costing(chain, costs, times, machine, Layout(chain), micro_batches)
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


def _prefixes(values: Sequence[float]) -> list[float]:
    """Return the sums of the first 0, 1, 2, ... values."""
    return list(itertools.accumulate(values, initial=0.0))
