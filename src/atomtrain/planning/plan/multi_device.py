"""Several devices of one host that share a model: what one of them may count on.

Each runs the same plan on its share of a step's micro-batches, behind a link of its own. The host's
memory and its optimizer are shared: there is one copy of parameters and optimizer state, and one
update a step. Gradients are added on the host before it, so each further device has host memory
for its own, and values that wait on the host are there once for each device.
"""

from __future__ import annotations

import dataclasses

from atomtrain.analysis.layers.chain import Chain
from atomtrain.planning.plan.layout import Layout
from atomtrain.planning.plan.updating import ADAMW_BYTES, UpdateModel

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
