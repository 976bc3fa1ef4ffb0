"""Searches the space of plans for the one to train with; `docs/planning.md` has the argument.

1. The least predicted step time among all plans that fit the device.
2. Of the plans that are at most 1% slower, those whose values wait on the device if there are any,
   and of these the one with the least device memory.

Both are exact for the space of `planning/space.py` and the predictor of `planning/timeline.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from atomtrain.analysis.chain import Chain
from atomtrain.analysis.costs import ChainCosts
from atomtrain.analysis.profile import LayerTime
from atomtrain.errors import PlanError
from atomtrain.planning.costing import Costing
from atomtrain.planning.layout import Layout
from atomtrain.planning.least import least_device_bytes
from atomtrain.planning.machine import Machine
from atomtrain.planning.memory import MemoryModel
from atomtrain.planning.optimum import Optimum
from atomtrain.planning.plan import Plan, Request
from atomtrain.planning.shape import Shape
from atomtrain.planning.space import Allowed, Family, Space
from atomtrain.units import format_bytes

_EQUAL = 0.01
"""Predicted times that differ by less are equal: profiles are no better than that."""


class Choice(NamedTuple):
    """A plan of the space."""

    shape: Shape
    step_s: float
    device_bytes: int


def make_plan(
    chain: Chain,
    costs: ChainCosts,
    times: Mapping[str, LayerTime],
    machine: Machine,
    request: Request,
) -> Plan:
    """Return the fastest plan that fits the machine, with the least memory among equals.

    Args:
        chain: The model.
        costs: Bytes of its layers for one micro-batch.
        times: Seconds of each kind of layer for one micro-batch.
        machine: Rates and budgets.
        request: What is fixed beforehand.

    Raises:
        PlanError: nothing fits (names the layer and the least budget that would do), or a time is
            missing, negative or no number.
    """
    layout = Layout(chain)
    state_bytes = request.optimizer_state_bytes
    memory = MemoryModel(chain, costs, layout, request.micro_batches, state_bytes)
    costing = Costing(chain, costs, times, machine, layout, request.micro_batches)
    space = Space(chain, costs, layout, memory, costing, request)
    _check_request(space, layout)
    fastest = fastest_of(space, machine.device_memory_bytes)
    if fastest is None:
        raise _does_not_fit(space, chain, machine)
    limit_s = (1 + _EQUAL) * fastest.step_s
    chosen = leanest_of(space, fastest, limit_s, machine.device_memory_bytes)
    plan = plan_of(chosen.shape, memory, costing, machine)
    if plan.host_bytes > machine.host_memory_bytes:
        raise PlanError(
            f"training this model takes {format_bytes(plan.host_bytes)} of host memory, "
            f"{format_bytes(machine.host_memory_bytes)} are there; choose a smaller model"
        )
    return plan


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
        bound=time.bound,
        **time._asdict(),
    )


def fits(chain: Chain, costs: ChainCosts, device_memory_bytes: int, micro_batches: int) -> bool:
    """Return whether some plan fits the device that keeps values between segments there."""
    layout = Layout(chain)
    memory = MemoryModel(chain, costs, layout, micro_batches)
    request = Request(micro_batches=micro_batches, boundary="device")
    # Times do not matter here.
    times = {cost.kind: LayerTime(0.0, 0.0) for cost in costs.layers}
    costing = Costing(chain, costs, times, _NO_MACHINE, layout, micro_batches)
    space = Space(chain, costs, layout, memory, costing, request)
    return least_device_bytes(space) <= device_memory_bytes


def fastest_of(space: Space, device_bytes: int) -> Choice | None:
    """Return a plan with the least predicted step time under a limit of device memory."""
    tasks: list[tuple[float, int, Optimum, Allowed]] = []
    for family in space.families:
        optimum = Optimum(space.costing, family, space.request.segments)
        for _, allowed in space.different(family, device_bytes):
            tasks.append((optimum.bound_s(allowed), len(tasks), optimum, allowed))
    best: Choice | None = None
    # Those that promise most first: the others then end early.
    for bound_s, _, optimum, allowed in sorted(tasks, key=lambda task: task[:2]):
        if best is not None and bound_s >= best.step_s:
            break
        found = optimum.best(allowed, np.inf if best is None else best.step_s)
        if found is not None:
            best = Choice(found.shape, found.step_s, space.memory.device_bytes(found.shape))
    return best


def leanest_of(space: Space, fastest: Choice, limit_s: float, device_bytes: int) -> Choice:
    """Return the plan with the least device memory among those that take at most `limit_s`.

    Plans whose values wait on the device come first: what goes through the host takes its memory
    bandwidth even where the prediction hides it.

    Args:
        space: The plans.
        fastest: The fastest one under the limit of memory.
        limit_s: The longest step.
        device_bytes: The limit of memory.
    """
    best: Choice | None = None
    for boundary in ("device", "host"):
        if fastest.shape.boundary == boundary:
            best = fastest
        for family in space.families:
            if family.boundary == boundary:
                most = device_bytes if best is None else best.device_bytes - 1
                best = _leanest(space, family, most, limit_s) or best
        if best is not None:
            return best
    return fastest


def _leanest(space: Space, family: Family, device_bytes: int, limit_s: float) -> Choice | None:
    """Return the leanest plan of a family that takes at most `limit_s`, by bisection of memory."""
    optimum = Optimum(space.costing, family, space.request.segments)
    below_s = float(np.nextafter(limit_s, np.inf))
    best: Choice | None = None
    low, high = 0, device_bytes
    limit = device_bytes
    while low <= high:
        found = None
        for _, allowed in space.different(family, limit):
            if optimum.bound_s(allowed) < below_s:
                found = found or optimum.best(allowed, below_s)
        if found is None:
            if best is None:
                return None
            low = limit + 1
        else:
            best = Choice(found.shape, found.step_s, space.memory.device_bytes(found.shape))
            high = best.device_bytes - 1
        limit = (low + high) // 2
    return best


def _check_request(space: Space, layout: Layout) -> None:
    segments, layers = space.request.segments, space.layers
    if segments is not None and segments > layers:
        raise PlanError(
            f"no partition has {segments} segments; this model's {layers} layers allow 1 to "
            f"{layers}"
        )
    wrong = [b for b in space.request.resident or () if not 0 <= b < layout.blocks]
    if wrong:
        raise PlanError(
            f"there is no block {wrong[0]} to be resident; this model has 0 to {layout.blocks - 1}"
        )


def _does_not_fit(space: Space, chain: Chain, machine: Machine) -> PlanError:
    needs = [space.memory.least_layer_bytes(index) for index in range(len(chain.layers))]
    worst = max(range(len(needs)), key=lambda index: needs[index])
    return PlanError(
        f"no plan fits the device budget of {format_bytes(machine.device_memory_bytes)}: layer "
        f"{chain.layers[worst].name!r} alone needs {format_bytes(needs[worst])} with this "
        f"micro-batch; raise --device-memory to at least {_rounded_up(least_device_bytes(space))}, "
        "or use smaller micro-batches"
    )


def _rounded_up(n_bytes: int) -> str:
    """Return a size in whole MiB (or KiB when small) that is not below `n_bytes`."""
    unit, name = (2**20, "MiB") if n_bytes >= 8 * 2**20 else (2**10, "KiB")
    return f"{-(-n_bytes // unit)}{name}"


_NO_MACHINE = Machine(
    name="none",
    load_bytes_per_s=1.0,
    unload_bytes_per_s=1.0,
    update_parameters_per_s=1.0,
    device_memory_bytes=1,
    host_memory_bytes=1,
)
