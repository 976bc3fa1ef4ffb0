"""Seconds of one kind of visit to all segments at once; a field is made when it is first needed.

Most families of plans are compared by their bounds alone, which need little of a table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atomtrain.planning.cost.timeline import VisitTime
from atomtrain.planning.cost.traffic import Moved
from atomtrain.planning.plan.machine import Machine
from atomtrain.planning.plan.schedule import Phase
from atomtrain.planning.plan.shape import Activation, Boundary
from atomtrain.planning.plan.updating import ADAMW_BYTES

Array = NDArray[np.float64]


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
    parameters_on_disk: bool
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
        """Seconds of loads on the link."""
        return _copied_s(
            self._loaded, self._share * self._machine.load_bytes_per_s, self._machine.copy_s
        )

    @cached_property
    def stage_s(self) -> Array:
        """Seconds in which what is loaded is read from disk."""
        if not self._basis.parameters_on_disk:
            return self._nothing
        read_rate, _ = self._machine.storage_rates
        # In backward the disk reads and writes at once.
        share = self._machine.storage_both_ways_share if self._backward else 1.0
        return self._loaded / (share * read_rate)

    @cached_property
    def loading_s(self) -> Array:
        """How long the loads take: the slower of disk and link."""
        lasting: Array = np.maximum(self.load_s, self.stage_s)
        return lasting

    @cached_property
    def unload_s(self) -> Array:
        """Seconds of unloads on the link."""
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
        """How long the visits last."""
        lasting: Array = np.maximum(self.compute_s, np.maximum(self.fetch_s, self.save_s))
        return lasting

    @cached_property
    def _nothing(self) -> Array:
        return np.zeros_like(self._moved.segment)

    @cached_property
    def _loaded(self) -> Array:
        """Bytes of parameters that are loaded."""
        if not self._load:
            return self._nothing
        # Resident blocks come with the first of their users or in pieces with all layers up to it;
        # their gradients leave with it.
        if self._phase is Phase.BACKWARD:
            return self._moved.segment
        return self._moved.segment + self._moved.coming

    @cached_property
    def _unloaded(self) -> Array:
        """Bytes of gradients."""
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
    """Return the seconds of copies, with what they take beside their bytes."""
    copied_s: Array = n_bytes / bytes_per_s
    return copied_s + start_s * (n_bytes > 0) if start_s else copied_s
