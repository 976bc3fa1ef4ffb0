"""Searches the space of plans for the one to train with; `docs/planning.md` has the argument.

1. The least predicted step time among all plans that fit the device.
2. Of the plans that are at most 1% slower, those whose values wait on the device if there are any;
   of these, those that offload nothing if there are any; and of these the one with the least
   device memory. If the fastest plan is among these, the one with the least memory of those that
   are as fast, within 0.2%.

3. Offloaded segments make again in backward what cheap operations can, unless plans in which they
   send everything are more than 0.5% faster (and host memory can hold it).

All are exact for the space of `space.py` and the predictor of `planning/cost/timeline.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from atomtrain.analysis.costs.costs import ChainCosts
from atomtrain.analysis.costs.profile import LayerTime
from atomtrain.analysis.layers.chain import Chain
from atomtrain.errors import PlanError
from atomtrain.planning.cost.costing import Given
from atomtrain.planning.plan.disk import OnDisk, choices
from atomtrain.planning.plan.machine import Machine
from atomtrain.planning.plan.plan import Plan, Request
from atomtrain.planning.plan.shape import Shape
from atomtrain.planning.search.choice import AS_FAST, Choice, rank_of
from atomtrain.planning.search.memory_limit import least_device_bytes
from atomtrain.planning.search.problem import Problem, problems_of
from atomtrain.units import format_bytes, format_seconds

EQUAL = 0.01
"""Plans that differ by less are equally fast: profiles are no better than that."""
WORTH_SENDING = 0.005
"""All that is saved is sent where that is faster by more than this. Less than `EQUAL`: what making
again takes is known by itself, apart from the layer's own time."""


class TooSlowError(PlanError):
    """No plan is as fast as was asked for."""


def make_plan(
    chain: Chain,
    costs: ChainCosts,
    times: Mapping[str, LayerTime],
    machine: Machine,
    request: Request,
    below_s: float = math.inf,
) -> Plan:
    """Return the fastest plan that fits the machine, with the least memory among equals.

    Args:
        chain: The model.
        costs: Bytes of its layers for one micro-batch.
        times: Seconds of each kind of layer for one micro-batch.
        machine: Rates and budgets.
        request: What is fixed beforehand.
        below_s: Plans whose step takes longer are of no use; the less time is given, the sooner it
            is known.

    Raises:
        TooSlowError: no plan is faster than `below_s`.
        PlanError: nothing fits (names the layer and the least budget that would do), or a time is
            missing, negative or no number.
    """
    given = Given(chain=chain, costs=costs, times=times, machine=machine)
    plans: list[Plan] = []
    too_slow: TooSlowError | None = None
    # More on disk is never faster, so nothing is behind the first that fits as it is fastest.
    possible = choices(request.disk)
    for on_disk in possible:
        settled = False
        for asked in _with_less_on_host(request):
            problems = problems_of(given, asked, on_disk)
            if on_disk != possible[-1] and problems[0].least_host_bytes > machine.host_memory_bytes:
                break  # no need to search for plans that cannot fit
            try:
                plan = _best(problems, machine, below_s)
            except TooSlowError as error:
                too_slow, settled = error, asked is request
                break
            plans.append(plan)
            fitting = plan.host_bytes <= machine.host_memory_bytes
            settled = fitting and asked is request
            if fitting or "offload" not in plan.activations:
                break
        if settled:
            break
    plans = [each for each in plans if each.host_bytes <= machine.host_memory_bytes]
    if plans:
        limit_s = (1 + EQUAL) * min(each.step_s for each in plans)
        return next(each for each in plans if each.step_s <= limit_s)
    if too_slow is not None:
        raise too_slow
    raise _too_large(plan, request, machine)


def plan_again(given: Given, request: Request, shape: Shape, on_disk: OnDisk) -> Plan | None:
    """Return the plan of a shape, without a search and whether or not it fits; `None` if there is
    no such plan of this model in the space.

    Raises:
        PlanError: as of `make_plan`, but for what does not fit.
    """
    if on_disk not in choices(request.disk):
        return None
    found = (problem.again(shape) for problem in problems_of(given, request, on_disk))
    return next((plan for plan in found if plan is not None), None)


def _too_large(plan: Plan, request: Request, machine: Machine) -> PlanError:
    most = " even with everything on disk that can be" if request.disk is not None else ""
    several = request.devices > 1
    disk = ", or let part of its state lie on disk (--disk)" if request.disk is None else ""
    return PlanError(
        f"training this model{f' on {request.devices} devices' if several else ''} takes "
        f"{format_bytes(plan.host_bytes)} of host memory{most}, "
        f"{format_bytes(machine.host_memory_bytes)} are there; choose a smaller model"
        f"{' or fewer devices' if several else ''}"
        f"{disk}"
    )


def _with_less_on_host(request: Request) -> list[Request]:
    """Return the request, and one that offloads nothing if that is for the planner to choose."""
    if request.activations is not None or not request.offload:
        return [request]
    return [request, dataclasses.replace(request, offload=False)]


def _best(problems: Sequence[Problem], machine: Machine, below_s: float) -> Plan:
    """Return the fastest plan of several problems, with the least memory among those as fast.

    All that is saved is sent only where that is worth it, and host memory can hold it.
    """
    remaking = _fastest([problem for problem in problems if problem.remakes], below_s)
    limit_s = min((each.step_s for each in remaking), default=math.inf) / (1 + WORTH_SENDING)
    sending = [problem for problem in problems if not problem.remakes]
    found = [some for some in (_fastest(sending, min(limit_s, below_s)), remaking) if some]
    if not found:
        if below_s < math.inf:
            raise _too_slow(below_s)
        raise _does_not_fit(problems, machine)
    plan = _leanest(found[0])
    if plan.host_bytes > machine.host_memory_bytes and len(found) > 1:
        return _leanest(found[1])
    return plan


class _Fastest(NamedTuple):
    problem: Problem
    choice: Choice
    step_s: float


def _fastest(problems: Sequence[Problem], below_s: float) -> list[_Fastest]:
    found, limit_s = [], below_s
    # The smallest first: what it finds leaves little of the others to be searched.
    for problem in sorted(problems, key=lambda problem: len(problem.space.families)):
        fastest = problem.fastest(limit_s)
        if fastest is not None:
            step_s = fastest.step_s + problem.host_s
            found.append(_Fastest(problem, fastest, step_s))
            limit_s = min(limit_s, (1 + EQUAL) * step_s)
    return found


def _leanest(found: Sequence[_Fastest]) -> Plan:
    limit_s = (1 + EQUAL) * min(step_s for _, _, step_s in found)
    plans = [
        problem.plan(problem.leanest(fastest, limit_s))
        for problem, fastest, step_s in found
        if step_s <= limit_s
    ]
    rank = min(rank_of(plan.shape) for plan in plans)
    plans = [plan for plan in plans if rank_of(plan.shape) == rank]
    limit_s = (1 + AS_FAST) * min(plan.step_s for plan in plans)
    plans = [plan for plan in plans if plan.step_s <= limit_s]
    return min(plans, key=lambda plan: (plan.device_peak_bytes, plan.host_layers))


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
    given = Given(chain=chain, costs=costs, times=times, machine=_NO_MACHINE)
    problems = problems_of(given, request)
    return any(least_device_bytes(p.space) <= device_memory_bytes for p in problems)


def least_budget_bytes(
    chain: Chain,
    costs: ChainCosts,
    times: Mapping[str, LayerTime],
    machine: Machine,
    request: Request,
) -> int:
    """Return the least device bytes of any plan, however slow; arguments as for `make_plan`."""
    given = Given(chain=chain, costs=costs, times=times, machine=machine)
    problems = problems_of(given, request)
    return min(least_device_bytes(problem.space) for problem in problems)


def _too_slow(below_s: float) -> TooSlowError:
    return TooSlowError(f"no plan takes less than {format_seconds(below_s)} a step")


def _does_not_fit(problems: Sequence[Problem], machine: Machine) -> PlanError:
    least = {least_device_bytes(problem.space): problem for problem in problems}
    problem = least[min(least)]
    needs = [problem.memory.least_layer_bytes(i) for i in range(len(problem.chain.layers))]
    worst = max(range(len(needs)), key=lambda index: needs[index])
    slots = problem.space.request.slots or 0
    return PlanError(
        f"no plan fits the device budget of {format_bytes(machine.device_memory_bytes)}: layer "
        f"{problem.chain.layers[worst].name!r} alone needs {format_bytes(needs[worst])} with this "
        f"micro-batch; raise --device-memory to at least {_rounded_up(min(least))}, or have less "
        "at once: smaller micro-batches, shorter sequences, 16-bit precision"
        f"{f', fewer than {slots} slots' if slots > 2 else ''}"
    )


def _rounded_up(n_bytes: int) -> str:
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
