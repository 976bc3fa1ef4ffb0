"""The plan of a training that goes on: what is kept of it, and whether it is taken again.

Plans follow measurements, which are made anew now and then, and bits may follow the plan: weights
that several layers share get their gradients in another order in one segment than in several. So
what was planned is kept together with what it was planned for. Where that is the same, and the plan
fits what memory there is now, it is followed without a search.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from atomtrain.engine.calibration.profile_cache import chain_key
from atomtrain.engine.devices.device import Device
from atomtrain.engine.devices.processor import EmulatedDevice
from atomtrain.engine.planner import Planner
from atomtrain.planning.plan.kept import KeptPlan
from atomtrain.planning.plan.plan import Plan, Request
from atomtrain.planning.plan.updating import share_of
from atomtrain.planning.search.search import plan_again
from atomtrain.units import format_bytes, parse_bytes

_LAYERS = "layers"
_OTHERWISE = ("updates", "disk")
"""Of what is asked of a plan: told in another way."""
_MOST_BYTES = 1 << 63
_SHOWN = 40
"""Characters of what somebody kept."""


def kept_plan(planner: Planner, devices: Sequence[Device], plan: Plan) -> KeptPlan:
    """Return what is kept of a plan."""
    return KeptPlan(
        made_for=_made_for(planner, devices),
        micro_batches=plan.micro_batches,
        on_disk=plan.on_disk,
        shape=plan.shape,
    )


class FirstPlan(NamedTuple):
    """What an engine begins with."""

    planner: Planner
    """With its `before`."""
    plan: Plan


def first_plan(planner: Planner, devices: Sequence[Device]) -> FirstPlan:
    """Return the plan that was kept, if there is one and it can be taken again, or the best.

    Raises:
        PlanError: no plan fits.
    """
    kept = planner.options.plan
    if kept is None:
        return FirstPlan(planner, planner.plan(_asked(planner, devices)))
    found = _again(planner, devices, KeptPlan.from_json(kept))
    if isinstance(found, Plan):
        return FirstPlan(dataclasses.replace(planner, before="as before"), found)
    plan = planner.plan(_asked(planner, devices))
    return FirstPlan(dataclasses.replace(planner, before=f"anew: {found}"), plan)


def _again(planner: Planner, devices: Sequence[Device], kept: KeptPlan) -> Plan | str:
    """Return the plan that was kept, or why it is not taken."""
    if planner.options.profile == "again":
        return "everything is measured again"
    for name, now in _made_for(planner, devices).items():
        before = kept.made_for.get(name)
        if before != now:
            differs = f"{name} was {_said(name, before)}, now it is {_said(name, now)}"
            return "layers or micro-batches are others now" if name == _LAYERS else differs
    request = planner.request(kept.micro_batches, kept.on_disk)
    plan = plan_again(planner.given, request, kept.shape, kept.on_disk)
    if plan is None or kept.micro_batches < _asked(planner, devices):
        return "this model has no plan like the one before"
    machine = planner.machine
    for place, needed, there in (
        ("device", plan.device_peak_bytes, machine.device_memory_bytes),
        ("host", plan.host_bytes, machine.host_memory_bytes),
    ):
        if needed > there:
            return (
                f"the one before takes {format_bytes(needed)} of {place} memory, "
                f"{format_bytes(there)} are there"
            )
    return plan


def _made_for(planner: Planner, devices: Sequence[Device]) -> dict[str, Any]:
    """Return all that a plan follows beside measurements and what memory is free; plain JSON."""
    device, options = devices[0], planner.options
    asked = planner.request(_asked(planner, devices))
    names = [field.name for field in dataclasses.fields(Request) if field.name not in _OTHERWISE]
    values = {name: getattr(asked, name) for name in names}
    memory = options.host_memory
    return {
        "device": device.name,
        "devices": len(devices),
        "link": device.link_bytes_per_s if isinstance(device, EmulatedDevice) else None,
        "device memory": device.asked_bytes,
        "host memory": None if memory is None else parse_bytes(memory, "host memory"),
        "disk": planner.states is not None,
        "on disk": options.on_disk,
        "compiled": planner.compiling.compiled,
        **{n.replace("_", " "): list(v) if isinstance(v, tuple) else v for n, v in values.items()},
        _LAYERS: chain_key(planner.chain, planner.costs),
    }


def _asked(planner: Planner, devices: Sequence[Device]) -> int:
    """Return the micro-batches of a device that were asked for."""
    return share_of(planner.options.micro_batches, len(devices))


def _said(name: str, value: Any) -> str:
    """Return a value, which may be anything, in one line."""
    if value is None:
        return "not given"
    if name.endswith(" memory") and type(value) is int and 0 <= value < _MOST_BYTES:
        return f"{format_bytes(value)} ({value} bytes)"
    plain = isinstance(value, str) and value.isprintable()
    return (value if plain else repr(value))[:_SHOWN]
