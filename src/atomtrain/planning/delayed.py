"""Plans for updates that are delayed by one step (`swapping/delayed.py`).

Nothing waits for them but the gradients of the step after, so they have as long as a step takes:
the best plan is the one whose step would be the shortest without updates, and steps follow each
other as fast as the slower of the two allows.
"""

from __future__ import annotations

import dataclasses
import itertools

from atomtrain.analysis.chain import Chain
from atomtrain.errors import PlanError
from atomtrain.planning.layout import Layout
from atomtrain.planning.plan import Plan, Request
from atomtrain.planning.shape import Shape
from atomtrain.planning.timeline import Span
from atomtrain.planning.updating import ADAMW_BYTES, UpdateModel, two_moments

_MOVED_BYTES = 6
"""Moved for each byte of a parameter beside its update: it is copied to scratch, back to the place
of its gradient, and from there to where it is loaded from; each reads and writes."""
LABEL = "of the step before"
"""What the predicted timeline calls the updates."""


def delayed_updates(updates: UpdateModel | None, chain: Chain) -> UpdateModel:
    """Return what delayed updates take of the host: room to update a block in, and copies."""
    updates = updates or two_moments(chain)
    moved = {id(p): _MOVED_BYTES * p.nbytes / ADAMW_BYTES for p in chain.parameters}
    return dataclasses.replace(
        updates,
        parameters={
            key: one._replace(host_work=one.host_work + moved.get(key, 0.0))
            for key, one in updates.parameters.items()
        },
        scratch_bytes=updates.scratch_bytes + largest_update_bytes(Layout(chain)),
        device_scratch_bytes=None,
    )


def largest_update_bytes(layout: Layout) -> int:
    """Return the bytes of the parameters of a block that are updated, of the block with most."""
    return max(layout.gradients.block_bytes(block) for block in range(layout.blocks))


def apart_from_steps(updates: UpdateModel | None, chain: Chain) -> UpdateModel:
    """Return the memory that delayed updates take, with no work that a step could wait for."""
    updates = delayed_updates(updates, chain)
    none = {key: one._replace(host_work=0.0) for key, one in updates.parameters.items()}
    return dataclasses.replace(updates, parameters=none)


def undelayed(request: Request, chain: Chain) -> Request:
    """Return the request of the plan whose step would be the shortest without updates.

    Raises:
        PlanError: updates cannot be delayed with what else is asked for.
    """
    refused = {
        "gradients that are spent at once": request.spends,
        "several devices": request.devices > 1,
        "state on disk": request.disk is not None,
        "layers on the host": bool(request.host_layers),
        "an optimizer on the device": bool(request.device_blocks),
    }
    for what, asked in refused.items():
        if asked:
            raise PlanError(f"updates cannot be delayed with {what}; leave out one of the two")
    return dataclasses.replace(
        request,
        clips=False,
        host_layers=0,
        device_blocks=(),
        updates=apart_from_steps(request.updates, chain),
    )


def delayed(plan: Plan, chain: Chain, request: Request, update_rate: float) -> Plan:
    """Return the plan of `undelayed(request)` with the delayed updates of the request.

    Args:
        plan: Made for that.
        chain: The model.
        request: The one that delays.
        update_rate: AdamW parameters that the host updates in a second.
    """
    update_s = delayed_updates(request.updates, chain).host_work / update_rate
    layout = Layout(chain)
    apart = sum(layout.gradients.block_bytes(block) for block in added_up(layout, plan.shape))
    return dataclasses.replace(
        plan,
        delays=True,
        update_s=update_s,
        step_s=max(plan.step_s, update_s),
        period_s=max(plan.period_s, update_s),
        bound="host optimizer"
        if update_s > max(plan.compute_s, plan.load_s, plan.unload_s)
        else plan.bound,
        host_bytes=plan.host_bytes + apart,
    )


def span_of(plan: Plan) -> Span:
    """Return when a step's stream of updates is busy, in the predicted timeline."""
    return Span("update", LABEL, 0.0, plan.update_s)


def added_up(layout: Layout, shape: Shape) -> list[int]:
    """Return the blocks whose gradients add up on the host, from more than one segment.

    Their new values cannot wait in the places of these, so they have places of their own.
    """
    bounds = list(itertools.pairwise(shape.backward_bounds))
    return [
        block
        for block in range(layout.blocks)
        if block not in shape.resident_blocks
        and sum(block in layout.blocks_of(*layers) for layers in bounds) > 1
    ]
