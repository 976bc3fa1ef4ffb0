"""What an optimizer takes of memory and time, parameter by parameter, of one device or of several.

Time is told in *AdamW parameters*: how many parameters a fused float32 AdamW updates in the same
time on the same processor. A machine then needs one rate for its host and one for its device,
whichever the optimizer.

Several devices of one host each run the same plan on their share of a step's micro-batches, behind
a link of their own. There is one copy of parameters and optimizer state, and one update a step.
Gradients are added on the host before it, so each further device has host memory for its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from atomtrain.analysis.layers.chain import Chain
from atomtrain.planning.plan.layout import Layout

ADAMW_BYTES = 28
"""What a fused float32 AdamW moves for a parameter: it reads parameter, gradient and two moments,
and writes all but the gradient."""
_HOST_FLOPS_PER_BYTE = 10
"""Float32 FLOPs of matrix products that a host does while it moves a byte: a socket of 64 cores
with AVX2 reaches 2 of its 4 TFLOP/s where memory gives 200 GB/s. An assumption, for optimizers that
multiply matrices, until they are measured."""
_DEVICE_FLOPS_PER_BYTE = 20
"""The same of devices: between 19 (H100) and 35 (RTX 3090) by the catalogue's shares."""
_SCALARS_BYTES = 16
"""Of a parameter that is updated on the device: its number of steps, its gradient's norm."""


class ParameterUpdate(NamedTuple):
    state_bytes: int
    """Of moments and master, between steps."""
    host_work: float
    """AdamW parameters of the host."""
    device_work: float
    """AdamW parameters of the device."""


class BlockUpdate(NamedTuple):
    """What updating a block takes; sums over its parameters."""

    state_bytes: int
    host_work: float
    device_work: float
    device_bytes: int
    """Of the state on the device, small tensors included."""


@dataclass(frozen=True, kw_only=True)
class UpdateModel:
    """What an optimizer takes of the parameters of a model."""

    parameters: Mapping[int, ParameterUpdate]
    """By the parameter's `id`; others are never updated."""
    scratch_bytes: int = 0
    """Of the host, beside the state."""
    device_scratch_bytes: int | None = 0
    """Of the device while a block is updated there, beside the state; `None`: it must stay on the
    host."""

    @property
    def host_bytes(self) -> int:
        return self.scratch_bytes + sum(one.state_bytes for one in self.parameters.values())

    @property
    def host_work(self) -> float:
        return sum(one.host_work for one in self.parameters.values())

    def of_blocks(self, chain: Chain, layout: Layout) -> list[BlockUpdate]:
        nothing = BlockUpdate(0, 0.0, 0.0, 0)
        blocks = [nothing] * layout.blocks
        for parameter in chain.parameters:
            one = self.parameters.get(id(parameter))
            if one is None:
                continue
            block = layout.block_of[id(parameter)]
            more = BlockUpdate(*one, one.state_bytes + _SCALARS_BYTES)
            sums = (a + b for a, b in zip(blocks[block], more, strict=True))
            blocks[block] = BlockUpdate(*sums)  # type: ignore[arg-type]
        return blocks


class Work(NamedTuple):
    host: float
    device: float


def work_of(parameter: Tensor, state_bytes: float, flops: float = 0.0) -> Work:
    """Return what updating a tensor takes by a roofline: memory traffic or matrix products.

    Parameter and state are read and written, the gradient (of the parameter's type) is read.

    Args:
        flops: Of matrix products in its update.
    """
    moved_bytes = 3 * parameter.numel() * parameter.element_size() + 2 * state_bytes
    host = max(moved_bytes, flops / _HOST_FLOPS_PER_BYTE) / ADAMW_BYTES
    device = max(moved_bytes, flops / _DEVICE_FLOPS_PER_BYTE) / ADAMW_BYTES
    return Work(host, device)


def two_moments(chain: Chain) -> UpdateModel:
    """Return what AdamW with moments of the parameters' own type takes, where nothing is known.

    Its time is that of float32.
    """
    return UpdateModel(
        parameters={
            id(p): ParameterUpdate(2 * p.numel() * p.element_size(), p.numel(), p.numel())
            for p in chain.parameters
            if p.requires_grad
        }
    )


_ADDED_BYTES = 3
"""Moved to add a byte of gradient: two are read, one is written."""


def share_of(micro_batches: int, devices: int) -> int:
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
