"""The caller's optimizer: what it takes of memory and time, and how it is divided by blocks.

All is asked of the optimizer itself. Divided, workers do the same for some of its parameters, with
state of their own. So blocks are updated one by one, each as soon as its gradient is there, and
their state can lie in different places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from atomtrain.analysis.layers.chain import Chain
from atomtrain.engine.state.precision import KeepsMasters
from atomtrain.engine.state.whole_optimizer import check_step_hooks
from atomtrain.engine.updates.independence import check_independence
from atomtrain.errors import ConfigError
from atomtrain.planning.plan.disk import StateBytes, States
from atomtrain.planning.plan.updating import ParameterUpdate, UpdateModel, two_moments, work_of

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
_GIVEN = "_given"
"""Key of a worker's group: what it was given last."""
_TORCH_COPIES = 3
"""Temporaries of a parameter's size that the optimizers of `torch.optim` make at most, unless they
are fused."""
_ADAMW_COPIES = 2
"""Those of `torch.optim.AdamW`: a square root, and its quotient."""


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


@runtime_checkable
class ClipsGradients(Protocol):
    """An optimizer that multiplies gradients by a number, in their own type, as it reads them."""

    clip_coefficient: Tensor | None


def tell_scaling(
    worker: torch.optim.Optimizer, factor: float, coefficient: Tensor | None
) -> Tensor | None:
    """Tell an optimizer what gradients are multiplied by in its next step.

    Returns:
        What the caller must multiply them by before: an optimizer that cannot clip as it reads
        costs one more pass over memory.
    """
    if isinstance(worker, ScalesGradients):
        worker.gradient_factor = factor
    if isinstance(worker, ClipsGradients):
        worker.clip_coefficient = coefficient
        return None
    return coefficient


def optimizer_of(chain: Chain, factory: OptimizerFactory) -> torch.optim.Optimizer:
    """Return what the factory makes of all trainable parameters (host tensors).

    Raises:
        ConfigError: nothing is trainable, or the factory returned no optimizer, or one whose
            parameters depend on each other.
    """
    trainable = [p for p in chain.parameters if p.requires_grad]
    if not trainable:
        raise ConfigError("no parameter has requires_grad=True; nothing can be trained")
    for parameter in trainable:
        parameter.data = parameter.data.contiguous()  # as it will lie in the host store
    optimizer = factory(trainable)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer=... must return a torch.optim.Optimizer, not {optimizer!r}")
    check_step_hooks(optimizer)
    check_independence(optimizer)
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


def worker_for(
    optimizer: torch.optim.Optimizer,
    members: Sequence[nn.Parameter],
    copies: Mapping[int, Tensor] | None = None,
) -> torch.optim.Optimizer | None:
    """Return the same optimizer for some parameters only.

    Its groups name the group of the whole one that they are a part of, as `_group`.

    Args:
        optimizer: That of all parameters.
        members: The parameters.
        copies: By the parameter's `id`, what is updated in its place; `None`: itself.

    Returns:
        `None` if none of them is ever updated.
    """
    keys = {id(p) for p in members}
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        inside = [p for p in group["params"] if id(p) in keys]
        if copies is not None:
            inside = [copies[id(p)] for p in inside]
        groups.append({**group, "params": inside, "_group": index})
    groups = [group for group in groups if group["params"]]
    if not groups:
        return None
    return copied(optimizer, groups)


def set_hyperparameters(group: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Give a worker's group what the whole optimizer has, but for what did not change there: that
    may be the optimizer's own, such as a count of its steps."""
    before = group.get(_GIVEN, {})
    for key, value in given.items():
        if key not in before or not _equal(before[key], value):
            group[key] = value
    group[_GIVEN] = given


def gather_counts(
    optimizer: torch.optim.Optimizer, workers: Iterable[torch.optim.Optimizer | None]
) -> dict[tuple[int, str], Any]:
    """Write what workers have changed in their groups by themselves to the whole optimizer's, and
    return it by the group's number and the key.

    Raises:
        ConfigError: they differ, so they depend on more than a single block.
    """
    found: dict[tuple[int, str], Any] = {}
    for worker in workers:
        for group in worker.param_groups if worker is not None else ():
            if _GIVEN not in group:  # it has taken no step
                continue
            given = group[_GIVEN]
            for key in group.keys() - {"params", "_group", _GIVEN}:
                if key in given and _equal(given[key], group[key]):
                    continue
                place = group["_group"], key
                if not _equal(found.setdefault(place, group[key]), group[key]):
                    raise ConfigError(
                        f"{type(optimizer).__name__} has come to unlike values of {key!r} for "
                        "parameters of one group, so it does not update each parameter "
                        "independently of the others; use one that does"
                    )
    for (number, key), value in found.items():
        optimizer.param_groups[number][key] = value
    return found


def _equal(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return one.shape == two.shape and torch.equal(one, two)
    return one is two or (type(one) is type(two) and bool(one == two))


def copied(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return the same optimizer with other groups, and with a state of its own, empty."""
    worker = optimizer.__class__.__new__(optimizer.__class__)
    worker.__dict__.update(optimizer.__dict__)
    # A scheduler puts its own in the place of the method: it would step the whole optimizer.
    worker.__dict__.pop("step", None)
    worker.param_groups = groups
    worker.state = type(optimizer.state)(dict)
    return worker
