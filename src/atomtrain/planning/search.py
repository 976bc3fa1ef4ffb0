"""Searches the space of plans for the one to train with; `docs/planning.md` has the argument.

1. The least predicted step time among all plans that fit the device.
2. Of the plans that are at most 1% slower, those whose values wait on the device if there are any;
   of these, those that offload nothing if there are any; and of these the one with the least
   device memory.

Both are exact for the space of `planning/space.py` and the predictor of `planning/timeline.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from atomtrain.analysis.chain import Chain
from atomtrain.analysis.costs import ChainCosts
from atomtrain.analysis.profile import LayerTime
from atomtrain.errors import PlanError
from atomtrain.planning.costing import Costing
from atomtrain.planning.disk import OnDisk, choices, disk_use
from atomtrain.planning.host import blocks_of_host, host_choices, host_s, whole_shape, without
from atomtrain.planning.layout import Layout
from atomtrain.planning.least import least_device_bytes
from atomtrain.planning.machine import Machine
from atomtrain.planning.memory import MemoryModel
from atomtrain.planning.mixed import Mixed
from atomtrain.planning.optimum import Found, Optimum
from atomtrain.planning.plan import Plan, Request
from atomtrain.planning.shape import Shape
from atomtrain.planning.space import Family, Space
from atomtrain.planning.updating import two_moments
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
    plans = []
    # More on disk is never faster, so nothing is behind the first that fits as it is fastest.
    possible = choices(request.disk)
    for on_disk in possible:
        for asked in _with_less_on_host(request):
            problems = _problems(chain, costs, times, machine, asked, on_disk)
            if on_disk != possible[-1] and problems[0].least_host_bytes > machine.host_memory_bytes:
                break  # no need to search for plans that cannot fit
            plan = _best(problems, machine)
            plans.append(plan)
            if plan.host_bytes <= machine.host_memory_bytes or "offload" not in plan.activations:
                break
        if plans and plans[-1].host_bytes <= machine.host_memory_bytes and asked is request:
            break
    fitting = [plan for plan in plans if plan.host_bytes <= machine.host_memory_bytes]
    if fitting:
        limit_s = (1 + _EQUAL) * min(plan.step_s for plan in fitting)
        return next(plan for plan in fitting if plan.step_s <= limit_s)
    most = " even with everything on disk that can be" if request.disk is not None else ""
    raise PlanError(
        f"training this model takes {format_bytes(plan.host_bytes)} of host memory{most}, "
        f"{format_bytes(machine.host_memory_bytes)} are there; choose a smaller model"
        f"{'' if request.disk is not None else ', or let part of its state lie on disk (--disk)'}"
    )


def _with_less_on_host(request: Request) -> list[Request]:
    """Return the request, and one that offloads nothing if that is for the planner to choose."""
    if request.activations is not None or not request.offload:
        return [request]
    return [request, dataclasses.replace(request, offload=False)]


def _best(problems: Sequence[_Problem], machine: Machine) -> Plan:
    """Return the fastest plan of several problems, with the least memory among equals."""
    times_s = [p.fastest.step_s + p.host_s for p in problems if p.fastest is not None]
    if not times_s:
        raise _does_not_fit(problems, machine)
    limit_s = (1 + _EQUAL) * min(times_s)
    found = [problem.leanest(limit_s) for problem in problems]
    plans = [
        problem.plan(choice) for problem, choice in zip(problems, found, strict=True) if choice
    ]
    return min(
        plans, key=lambda plan: (_rank(plan.shape), plan.device_peak_bytes, plan.host_layers)
    )


class _Problem:
    """The plans with a number of leading layers on the host."""

    def __init__(
        self,
        chain: Chain,
        costs: ChainCosts,
        times: Mapping[str, LayerTime],
        machine: Machine,
        request: Request,
        host_layers: int,
        on_disk: OnDisk,
    ) -> None:
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
        layout = Layout(self.chain)
        states = request.disk.states if request.disk is not None else {}
        disk = disk_use(self.chain, layout, states, on_disk)
        self._disk = disk_use(chain, Layout(chain), states, on_disk)
        self.memory = MemoryModel(self.chain, rest_costs, layout, count, updates)
        self.costing = Costing(
            self.chain, rest_costs, times, machine, layout, count,
            disk=disk, clips=request.clips, updates=updates,
        )  # fmt: skip
        host_used = blocks_of_host(chain, self.chain, layout, host_layers)
        self.space = Space(
            self.chain, rest_costs, layout, self.memory, self.costing, request, host_used
        )
        self._all = MemoryModel(chain, costs, Layout(chain), count, updates, self._disk)
        self.host_s = host_s(chain, costs, host_layers, machine, count, self._disk, updates)
        _check_request(self.space, layout)

    @property
    def least_host_bytes(self) -> int:
        """What any plan takes of host memory, and most take more."""
        return self._all.state_bytes

    @cached_property
    def fastest(self) -> Choice | None:
        """A fastest plan of the rest; the host's part of the step is not in its time."""
        return fastest_of(self.space, self._machine.device_memory_bytes)

    def leanest(self, limit_s: float) -> Choice | None:
        """Return the leanest plan of the rest with which a step takes at most `limit_s`."""
        if self.fastest is None or self.fastest.step_s + self.host_s > limit_s:
            return None
        device_bytes = self._machine.device_memory_bytes
        return leanest_of(self.space, self.fastest, limit_s - self.host_s, device_bytes)

    def plan(self, choice: Choice) -> Plan:
        """Return the plan of the whole chain."""
        plan = plan_of(choice.shape, self.memory, self.costing, self._machine)
        shape = whole_shape(choice.shape, self._whole, self.chain, self.host_layers)
        return dataclasses.replace(
            plan,
            **shape._asdict(),
            host_bytes=self._all.host_bytes(shape),
            on_disk=self._disk.on_disk,
            disk_bytes=self._disk.file_bytes,
            disk_written_bytes=self._disk.written_bytes,
            step_s=plan.step_s + self.host_s,
        )


def _problems(
    chain: Chain,
    costs: ChainCosts,
    times: Mapping[str, LayerTime],
    machine: Machine,
    request: Request,
    on_disk: OnDisk = (),
) -> list[_Problem]:
    counts = host_choices(chain, costs)
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
    counts = [n for n in counts if n == counts[0] or len(chain.layers) - n >= fewest]
    return [_Problem(chain, costs, times, machine, request, n, on_disk) for n in counts]


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
        bound=time.bound,
        **time._asdict(),
    )


def fits(chain: Chain, costs: ChainCosts, device_memory_bytes: int, micro_batches: int) -> bool:
    """Return whether some plan fits the device that keeps values between segments there, and
    recomputes everything."""
    request = Request(
        micro_batches=micro_batches,
        boundary="device",
        device_blocks=(),
        activations="recompute",
    )
    # Times do not matter here.
    times = {cost.kind: LayerTime(0.0, 0.0) for cost in costs.layers}
    problems = _problems(chain, costs, times, _NO_MACHINE, request)
    return any(least_device_bytes(p.space) <= device_memory_bytes for p in problems)


def least_budget_bytes(
    chain: Chain,
    costs: ChainCosts,
    times: Mapping[str, LayerTime],
    machine: Machine,
    request: Request,
) -> int:
    """Return the least device bytes of any plan, however slow; arguments as for `make_plan`."""
    problems = _problems(chain, costs, times, machine, request)
    return min(least_device_bytes(problem.space) for problem in problems)


def fastest_of(space: Space, device_bytes: int) -> Choice | None:
    """Return a plan with the least predicted step time under a limit of device memory."""
    tasks = sorted(
        (
            task
            for family in space.families
            for task in _Solvers(space, family, offload=space.request.offload).tasks(device_bytes)
        ),
        key=lambda task: task.bound_s,
    )
    best: Choice | None = None
    # Those that promise most first: the others then end early.
    for task in tasks:
        if best is not None and task.bound_s >= best.step_s:
            break
        found = task.best(np.inf if best is None else best.step_s)
        if found is not None:
            best = Choice(found.shape, found.step_s, space.memory.device_bytes(found.shape))
    return best


class _Task(NamedTuple):
    """A part of the space that is searched at once, under a limit of device memory."""

    bound_s: float
    """No plan of the part is faster."""
    best: Callable[[float], Found | None]
    """Gives the part's fastest plan, or `None` if none is faster than so many seconds."""


class _Solvers:
    """What searches the plans of a family."""

    def __init__(self, space: Space, family: Family, *, offload: bool) -> None:
        """`offload`: whether segments may be offloaded."""
        self._space, self._family = space, family
        self._optimum = self._mixed = None
        if space.recomputes or family.whole:
            self._optimum = Optimum(space.costing, family, space.request.segments)
        if space.mixes and not family.whole:
            self._mixed = Mixed(space, family, offload=offload)

    def tasks(self, device_bytes: int) -> Iterator[_Task]:
        """Yield the parts of the family under a limit of device memory."""
        space, family = self._space, self._family
        loosest = space.loosest(family, device_bytes)
        if loosest is None:
            return
        if self._optimum is not None:
            best = functools.partial(_best_recomputed, space, family, self._optimum, device_bytes)
            yield _Task(self._optimum.bound_s(loosest), best)
        if self._mixed is not None:
            sizes = space.slot_sizes(family)
            sizes = [n for n in sizes if space.held_bytes(family, n) < device_bytes]
            bound_s = self._mixed.bound_s(self._mixed.room(sizes, device_bytes))
            yield _Task(bound_s, functools.partial(self._mixed.best, sizes, device_bytes))


def _best_recomputed(
    space: Space, family: Family, optimum: Optimum, device_bytes: int, below_s: float
) -> Found | None:
    """Return a family's fastest plan that recomputes everything, if it is below `below_s`."""
    some = [allowed for _, allowed in space.different(family, device_bytes)]
    best = None
    for bound_s, index in sorted((optimum.bound_s(a), i) for i, a in enumerate(some)):
        if bound_s >= below_s:
            break
        found = optimum.best(some[index], below_s)
        if found is not None:
            best, below_s = found, found.step_s
    return best


def leanest_of(space: Space, fastest: Choice, limit_s: float, device_bytes: int) -> Choice:
    """Return the plan with the least device memory among those that take at most `limit_s`.

    Plans whose values wait on the device come first, then those that offload nothing: what goes
    through the host takes its memory bandwidth even where the prediction hides it.

    Args:
        space: The plans.
        fastest: The fastest one under the limit of memory.
        limit_s: The longest step.
        device_bytes: The limit of memory.
    """
    best: Choice | None = None
    for rank in itertools.product(("device", "host"), (False, True)):
        boundary, offload = rank
        if offload and not space.request.offload:
            continue
        if _rank(fastest.shape) == rank:
            best = fastest
        # Those with less of everything first: the others then end early.
        for family in reversed(space.families):
            if family.boundary != boundary:
                continue
            most = device_bytes if best is None else best.device_bytes - 1
            best = _leanest(space, family, most, limit_s, offload) or best
        if best is not None:
            return best
    return fastest


def _rank(shape: Shape) -> tuple[str, bool]:
    """Return how much a shape sends through the host; less comes first."""
    return shape.boundary, "offload" in shape.activations


def _leanest(
    space: Space, family: Family, device_bytes: int, limit_s: float, offload: bool
) -> Choice | None:
    """Return the leanest plan of a family that takes at most `limit_s`, by bisection of memory."""
    below_s = float(np.nextafter(limit_s, np.inf))
    solvers = _Solvers(space, family, offload=offload)
    best: Choice | None = None
    low, high = 0, device_bytes
    limit = device_bytes
    while low <= high:
        found = None
        for task in solvers.tasks(limit):
            if task.bound_s < below_s:
                found = task.best(below_s)
            if found is not None:
                break
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


def _does_not_fit(problems: Sequence[_Problem], machine: Machine) -> PlanError:
    least = {least_device_bytes(problem.space): problem for problem in problems}
    problem = least[min(least)]
    needs = [problem.memory.least_layer_bytes(i) for i in range(len(problem.chain.layers))]
    worst = max(range(len(needs)), key=lambda index: needs[index])
    return PlanError(
        f"no plan fits the device budget of {format_bytes(machine.device_memory_bytes)}: layer "
        f"{problem.chain.layers[worst].name!r} alone needs {format_bytes(needs[worst])} with this "
        f"micro-batch; raise --device-memory to at least {_rounded_up(min(least))}, or use "
        "smaller micro-batches"
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
