"""One search: a number of leading layers on the host, and some kinds of state on disk."""

from __future__ import annotations

import dataclasses

from atomtrain.errors import PlanError
from atomtrain.planning.cost.costing import Costing, Given, Steps
from atomtrain.planning.cost.host import (
    blocks_of_host,
    host_choices,
    host_time,
    rest_shape,
    whole_shape,
    without,
)
from atomtrain.planning.cost.memory import MemoryModel
from atomtrain.planning.cost.segments import segments_of
from atomtrain.planning.plan.disk import OnDisk, disk_use
from atomtrain.planning.plan.layout import Layout
from atomtrain.planning.plan.machine import Machine
from atomtrain.planning.plan.plan import Plan, Request
from atomtrain.planning.plan.shape import Shape
from atomtrain.planning.plan.updating import two_moments
from atomtrain.planning.search.choice import Choice, fastest_of, leanest_of
from atomtrain.planning.search.space import Space


class Problem:
    """The plans with a number of leading layers on the host, whose offloaded segments make
    something again or all send everything."""

    def __init__(
        self,
        given: Given,
        request: Request,
        host_layers: int,
        on_disk: OnDisk,
        *,
        remakes: bool = True,
    ) -> None:
        """`given` is what goes with `remakes`."""
        self.remakes = remakes
        chain, costs, machine = given.chain, given.costs, given.machine
        self.host_layers, self._whole, self._machine = host_layers, chain, machine
        self.chain, rest_costs = without(chain, costs, host_layers)
        count = request.micro_batches
        if on_disk:  # what is updated on the device is all in memory
            if request.device_blocks:
                raise PlanError(
                    "blocks that are updated on the device have no state on disk; leave one of "
                    "them to the planner"
                )
            request = dataclasses.replace(request, device_blocks=())
        # Of all parameters: who is not on the device is updated on the host.
        updates = request.updates or two_moments(chain)
        layout = segments_of(self.chain, rest_costs).layout
        whole_layout = segments_of(chain, costs).layout
        states = request.disk.states if request.disk is not None else {}
        disk = disk_use(self.chain, layout, states, on_disk, request.devices)
        self._disk = disk_use(chain, whole_layout, states, on_disk, request.devices)
        self.memory = MemoryModel(self.chain, rest_costs, count, updates, spends=request.spends)
        steps = Steps(
            micro_batches=count,
            disk=disk,
            clips=request.clips,
            updates=updates,
            spends=request.spends,
        )
        rest = dataclasses.replace(given, chain=self.chain, costs=rest_costs)
        self.costing = Costing(rest, steps)
        host_used = blocks_of_host(chain, self.chain, layout, host_layers)
        self.space = Space(rest_costs, self.memory, self.costing, request, host_used)
        self._all = MemoryModel(
            chain,
            costs,
            count,
            updates,
            self._disk,
            request.devices,
            spends=request.spends,
        )
        aside = host_time(chain, costs, host_layers, machine, count, self._disk, updates)
        self.host_s = aside.step_s
        _check_request(self.space, layout)

    @property
    def least_host_bytes(self) -> int:
        return self._all.state_bytes

    def fastest(self, below_s: float) -> Choice | None:
        """Return a fastest plan of the rest, or `None` if no step is faster than `below_s`; the
        host's part of the step is not in its time."""
        device_bytes = self._machine.device_memory_bytes
        return fastest_of(self.space, device_bytes, below_s - self.host_s)

    def leanest(self, fastest: Choice, limit_s: float) -> Choice:
        """Return the leanest plan of the rest with which a step takes at most `limit_s`, as it does
        with the fastest one."""
        device_bytes = self._machine.device_memory_bytes
        return leanest_of(self.space, fastest, limit_s - self.host_s, device_bytes)

    def again(self, shape: Shape) -> Plan | None:
        """Return the plan of a shape of the whole chain, whether or not it fits; `None` if it is
        not one of these."""
        if (shape.host_layers, shape.remakes) != (self.host_layers, self.remakes):
            return None
        rest = rest_shape(shape, self._whole, self.chain)
        if not self.space.has(rest):
            return None
        plan = self.plan(Choice(rest, 0.0, 0))
        return plan if plan.shape == shape else None

    def plan(self, choice: Choice) -> Plan:
        offloads = "offload" in choice.shape.activations
        shape = choice.shape._replace(remakes=self.remakes or not offloads)
        plan = plan_of(shape, self.memory, self.costing, self._machine)
        shape = whole_shape(shape, self._whole, self.chain, self.host_layers)
        return dataclasses.replace(
            plan,
            **shape._asdict(),
            host_bytes=self._all.host_bytes(shape),
            on_disk=self._disk.on_disk,
            disk_bytes=self._disk.file_bytes,
            disk_written_bytes=self._disk.file_bytes,
            step_s=plan.step_s + self.host_s,
        )


def problems_of(given: Given, request: Request, on_disk: OnDisk = ()) -> list[Problem]:
    """Return the problems of a request, one for each number of layers that may run on the host, and
    the same where offloaded segments make nothing again, if any makes something.

    Raises:
        PlanError: the request cannot be met.
    """
    counts = host_choices(given.chain, given.costs)
    if request.host_layers is not None:
        if request.host_layers not in counts:
            allowed = " or ".join(map(str, counts))
            raise PlanError(
                f"host_layers is {request.host_layers}; with this model it can be {allowed}: only "
                "leading layers that look up in large tables can run on the host"
            )
        if request.host_layers and (request.resident or request.device_blocks):
            raise PlanError(
                "resident blocks cannot be fixed together with layers on the host; leave one of "
                "them to the planner"
            )
        counts = [request.host_layers]
    elif request.resident is not None or request.device_blocks:
        counts = [0]  # their blocks are those of all layers
    fewest = request.segments or 1
    counts = [n for n in counts if n == counts[0] or len(given.chain.layers) - n >= fewest]
    problems = [Problem(given, request, n, on_disk) for n in counts]
    if request.offload and request.activations in (None, "offload") and given.costs.remakes:
        sending = given.sending_all()
        problems += [Problem(sending, request, n, on_disk, remakes=False) for n in counts]
    return problems


def _check_request(space: Space, layout: Layout) -> None:
    segments, layers = space.request.segments, space.layers
    if segments is not None and segments > layers:
        raise PlanError(
            f"no partition has {segments} segments; this model's {layers} layers allow 1 to "
            f"{layers}"
        )
    resident, there = space.request.resident, space.request.device_blocks
    if there and not space.memory.updates_on_device:
        raise PlanError(
            "this optimizer cannot run on the device; leave its blocks to the host, or use one of "
            "atomtrain.optimizers"
        )
    if there and resident is not None and not set(there) <= set(resident):
        raise PlanError("blocks that are updated on the device must be resident too")
    wrong = [b for b in (*(resident or ()), *(there or ())) if not 0 <= b < layout.blocks]
    if wrong:
        raise PlanError(
            f"there is no block {wrong[0]} to be resident; this model has 0 to {layout.blocks - 1}"
        )


def plan_of(shape: Shape, memory: MemoryModel, costing: Costing, machine: Machine) -> Plan:
    """Return the plan of a shape with its predicted time and memory, whether or not it fits."""
    time = costing.step(shape)
    return Plan(
        **shape._asdict(),
        **memory.sizes(shape)._asdict(),
        micro_batches=memory.micro_batches,
        device_peak_bytes=memory.device_bytes(shape),
        device_memory_bytes=machine.device_memory_bytes,
        host_bytes=memory.host_bytes(shape),
        on_disk=(),
        disk_bytes=0,
        disk_written_bytes=0,
        spends=memory.spends,
        bound=time.bound,
        **time._asdict(),
    )
