"""What an optimizer takes of memory and time, asked of the optimizer itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from atomtrain.analysis.layers.chain import Chain
from atomtrain.planning.plan.updating import ParameterUpdate, UpdateModel, two_moments, work_of

_TORCH_COPIES = 3
"""Temporaries of a parameter's size that the optimizers of `torch.optim` make at most, unless they
are fused."""
_ADAMW_COPIES = 2
"""Those of `torch.optim.AdamW`: a square root, and its quotient."""


@runtime_checkable
class KnowsItsState(Protocol):
    """An optimizer that knows how much memory it takes."""

    def state_bytes_of(self, parameter: Tensor) -> int:
        """Return the bytes of a parameter's state, now or later."""
        ...

    def scratch_bytes(self, *, on_gpu: bool = False) -> int:
        """Return the bytes that updates need beside the state."""
        ...


@runtime_checkable
class KnowsItsProducts(Protocol):
    """An optimizer that multiplies matrices."""

    def flops_of(self, parameter: Tensor) -> int:
        """Return the FLOPs of a parameter's update."""
        ...


def update_model(
    optimizer: torch.optim.Optimizer, chain: Chain, *, on_gpu: bool | None = None
) -> UpdateModel:
    """Return what an optimizer takes, by the bytes that it moves and the FLOPs that it does.

    An optimizer that is not known is taken for AdamW of two moments, on the host only.

    Args:
        optimizer: Of all parameters.
        chain: The model.
        on_gpu: Whether the device is one; `None` if the plan may be for either. `torch.optim`
            works on all parameters of a block at once there, and scratch is larger.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if isinstance(optimizer, KnowsItsState):
        sizes = [optimizer.state_bytes_of(parameter) for parameter in parameters]
        scratch, there = (
            optimizer.scratch_bytes(),
            optimizer.scratch_bytes(on_gpu=on_gpu is not False),
        )
    else:
        found = [_torch_state_bytes(optimizer, parameter) for parameter in parameters]
        if None in found:
            return UpdateModel(
                parameters=two_moments(chain).parameters,
                device_scratch_bytes=None,
            )
        sizes = [size for size in found if size is not None]
        scratch, there = 0, _torch_scratch_bytes(optimizer, chain, bool(on_gpu))
    flops = optimizer.flops_of if isinstance(optimizer, KnowsItsProducts) else _no_flops
    return UpdateModel(
        parameters={
            id(p): ParameterUpdate(size, *work_of(p, size, flops(p)))
            for p, size in zip(parameters, sizes, strict=True)
        },
        scratch_bytes=scratch,
        device_scratch_bytes=there,
    )


def _no_flops(_: Tensor) -> int:
    return 0


def _torch_state_bytes(optimizer: torch.optim.Optimizer, parameter: Tensor) -> int | None:
    """Return the state of a parameter with an optimizer of `torch.optim`, `None` if unknown."""
    group = next(
        g for g in optimizer.param_groups if any(parameter is member for member in g["params"])
    )
    copies: int
    if type(optimizer) in (torch.optim.AdamW, torch.optim.Adam):
        copies = 3 if group["amsgrad"] else 2
    elif type(optimizer) is torch.optim.SGD:
        copies = 1 if group["momentum"] else 0
    else:
        return None
    return copies * parameter.numel() * parameter.element_size()


def _torch_scratch_bytes(optimizer: torch.optim.Optimizer, chain: Chain, foreach: bool) -> int:
    if all(group.get("fused") for group in optimizer.param_groups):
        return 0
    if foreach:
        each = (_bytes([*layer.parameters.values()]) for layer in chain.layers)
    else:
        each = (_bytes([parameter]) for parameter in chain.parameters)
    copies = _ADAMW_COPIES if type(optimizer) is torch.optim.AdamW else _TORCH_COPIES
    return copies * max(each, default=0)


def _bytes(parameters: Sequence[Tensor]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
