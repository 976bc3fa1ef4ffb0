"""What the engine asks of an optimizer: who makes it, what its state takes, what it scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from atomtrain.analysis.layers.chain import Chain
from atomtrain.engine.state.precision import KeepsMasters
from atomtrain.errors import ConfigError
from atomtrain.planning.plan.disk import StateBytes, States

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@runtime_checkable
class KeepsScratch(Protocol):
    """An optimizer that keeps scratch memory from update to update."""

    def free_scratch(self) -> None:
        """Free what the calling thread keeps."""
        ...


@runtime_checkable
class ScalesGradients(Protocol):
    """An optimizer that multiplies gradients by a factor, in float32, before it uses them."""

    gradient_factor: float


def optimizer_of(chain: Chain, factory: OptimizerFactory) -> torch.optim.Optimizer:
    """Return what the factory makes of all trainable parameters (host tensors).

    Raises:
        ConfigError: nothing is trainable, or the factory returned no optimizer.
    """
    trainable = [p for p in chain.parameters if p.requires_grad]
    if not trainable:
        raise ConfigError("no parameter has requires_grad=True; nothing can be trained")
    for parameter in trainable:
        parameter.data = parameter.data.contiguous()  # as it will lie in the host store
    optimizer = factory(trainable)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer=... must return a torch.optim.Optimizer, not {optimizer!r}")
    return optimizer


@runtime_checkable
class TellsItsState(Protocol):
    """An optimizer that knows the tensors of its state beforehand."""

    def state_parts_of(self, parameter: Tensor) -> Mapping[str, int]:
        """Return the bytes of each tensor of a parameter's state, now or later; no scalars."""
        ...


def states_of(optimizer: torch.optim.Optimizer) -> States:
    """Return the optimizer's state of each parameter; AdamW's moments if it does not tell."""
    hidden = optimizer.master_keys() if isinstance(optimizer, KeepsMasters) else frozenset()
    states = {}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if not isinstance(optimizer, TellsItsState):
            states[id(parameter)] = StateBytes((parameter.nbytes, parameter.nbytes))
            continue
        parts = optimizer.state_parts_of(parameter)
        states[id(parameter)] = StateBytes(
            tuple(n_bytes for key, n_bytes in parts.items() if key not in hidden),
            tuple(n_bytes for key, n_bytes in parts.items() if key in hidden),
        )
    return states
