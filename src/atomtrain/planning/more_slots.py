"""More than two slots, where that shortens the time from step to step (`planning/period.py`).

A step by itself gains nothing from a third slot: two are enough to load one segment while another
is computed with. Steps in a row do, where they wait for the link: forward computes a third as long
as backward for each byte that it loads, and each slot is a segment of the next forward that comes
while backward still computes. So plans are searched with each of a few numbers of slots as if steps
stood alone, and what is found is compared by the time from step to step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from atomtrain.errors import PlanError
from atomtrain.planning.costing import Given, period_of
from atomtrain.planning.plan import Plan, Request

EQUAL = 0.01
"""Plans that differ by less are equally fast: profiles are no better than that."""
_WORTH_TRYING = 0.02
"""A search for each number of slots is not made to save less than this."""
_AT_ONCE_BYTES_PER_S = 1e18


def comes_ahead(request: Request) -> bool:
    """Return whether anything of the next step may come while one ends."""
    return not request.clips and request.devices == 1


def with_more_slots(
    plan: Plan, given: Given, request: Request, planned: Callable[[Request], Plan]
) -> Plan:
    """Return the plan with the shortest time from step to step, or one that is equally fast with
    fewer slots.

    Args:
        plan: Of one or two slots.
        given: Model and machine.
        request: What the plan was made for.
        planned: Gives the fastest plan for a request if steps stand alone, with the least memory
            among equals.
    """
    if request.slots is not None or not comes_ahead(request) or plan.on_disk:
        return plan
    if _without_loads_s(plan, given, request) >= (1 - _WORTH_TRYING) * plan.period_s:
        return plan
    plans = [plan]
    for slots in slot_counts(len(given.chain.layers)):
        try:
            plans.append(planned(dataclasses.replace(request, slots=slots, disk=None)))
        except PlanError:  # device or host have no memory for it
            continue
    limit_s = (1 + EQUAL) * min(each.period_s for each in plans)
    return next(each for each in plans if each.period_s <= limit_s)


def _without_loads_s(plan: Plan, given: Given, request: Request) -> float:
    """Return the time from step to step if loads took none: with the same segments and any number
    of slots it is not shorter, since slots only let loads begin sooner."""
    machine = dataclasses.replace(given.machine, load_bytes_per_s=_AT_ONCE_BYTES_PER_S)
    given = dataclasses.replace(given, machine=machine)
    return period_of(plan, given, updates=request.updates)


def slot_counts(layers: int) -> Iterator[int]:
    """Yield the numbers of slots that are tried: 3, 4, 6, 8, 12, 16, ..., up to one for each of the
    layers."""
    slots = 2
    while True:
        for count in (slots + slots // 2, 2 * slots):
            if count > layers:
                return
            yield count
        slots *= 2
