"""Several devices of one host that share a model: what one of them may count on.

Each runs the same plan on its share of a step's micro-batches, behind a link of its own. The host's
memory and its optimizer are shared: there is one copy of parameters and optimizer state, and one
update a step. Gradients are added on the host before it, so each further device has host memory
for its own, and values that wait on the host are there once for each device.
"""

from __future__ import annotations

import dataclasses

from atomtrain.analysis.chain import Chain
from atomtrain.errors import PlanError
from atomtrain.planning.layout import Layout
from atomtrain.planning.machine import Machine
from atomtrain.planning.memory import PROCESS_BYTES
from atomtrain.planning.plan import Plan
from atomtrain.planning.updating import ADAMW_BYTES, UpdateModel
from atomtrain.units import format_bytes

_ADDED_BYTES = 3
"""Moved to add a byte of gradient: two are read, one is written."""


def share_of(micro_batches: int, devices: int) -> int:
    """Return the largest share of a step's micro-batches."""
    return -(-micro_batches // devices)


def further_gradients_bytes(layout: Layout, devices: int) -> int:
    """Return the host memory of all devices' gradients but the first's."""
    return (devices - 1) * layout.gradient_factor * layout.gradients.total_bytes


def shared_updates(updates: UpdateModel, chain: Chain, devices: int) -> UpdateModel:
    """Return what updating takes when the gradients of several devices are added before.

    Nothing can be updated on the devices then.
    """
    if devices == 1:
        return updates
    work = {
        id(p): (devices - 1) * chain.gradient_factor * p.nbytes * _ADDED_BYTES / ADAMW_BYTES
        for p in chain.parameters
    }
    return dataclasses.replace(
        updates,
        parameters={
            key: one._replace(host_work=one.host_work + work.get(key, 0.0))
            for key, one in updates.parameters.items()
        },
        scratch_bytes=updates.scratch_bytes + further_gradients_bytes(Layout(chain), devices),
        device_scratch_bytes=None,
    )


def plan_of_all(
    plan: Plan, chain: Chain, updates: UpdateModel, machine: Machine, devices: int
) -> Plan:
    """Return one device's plan with the host memory that all devices take together.

    Args:
        plan: Made with `updates`.
        chain: The model.
        updates: What `shared_updates` returned.
        machine: Whose host it is.
        devices: How many.

    Raises:
        PlanError: it is more than there is.
    """
    if devices == 1:
        return plan
    held_bytes = Layout(chain).arena_bytes + updates.host_bytes + PROCESS_BYTES
    waiting_bytes = max(0, plan.host_bytes - held_bytes)
    plan = dataclasses.replace(plan, host_bytes=plan.host_bytes + (devices - 1) * waiting_bytes)
    if plan.host_bytes > machine.host_memory_bytes:
        raise PlanError(
            f"training this model on {devices} devices takes {format_bytes(plan.host_bytes)} of "
            f"host memory, {format_bytes(machine.host_memory_bytes)} are there; give fewer devices "
            "or smaller micro-batches"
        )
    return plan
