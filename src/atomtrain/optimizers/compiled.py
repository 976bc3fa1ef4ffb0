"""Updates by the compiled core: the arithmetic of `moments`, `companding`, `masters` and SGD in one
pass over memory, with the same bits.

Gradients may be clipped on the way: the product is rounded to their own type, as `mul_` does.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

from torch import Tensor

from atomtrain.native import library, updates
from atomtrain.native.library import address
from atomtrain.optimizers import masters, moments, randomness
from atomtrain.optimizers.masters import STREAMS
from atomtrain.optimizers.paths import UNSCALED, Scaling


def adamw_update(
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Any],
    group: dict[str, Any],
    scaling: Scaling = UNSCALED,
) -> None:
    """Do what `moments.adamw_update` does; the gradient is read only. All is on the CPU."""
    kind = group["state"]
    state["step"] += 1
    memory = _memory(parameter, gradient, state, group, scaling)
    memory.moments_kind = updates.MOMENTS[kind]
    memory.first, memory.second = address(state["exp_avg"]), address(state["exp_avg_sq"])
    if kind == "int8":
        memory.first_scale = address(state["exp_avg_scale"])
        memory.second_scale = address(state["exp_avg_sq_scale"])
    table, starts = None, []
    if kind != "float32":
        flat, factor = gradient.view(-1), memory.factor
        salts = moments.salts(flat, factor, scaling.coefficient)
        table = randomness.compact(kind)
        starts = moments.starts(group["seed"], int(state["step"]), salts)
    numbers = _adamw_numbers(group, float(state["step"]))
    slice_elements = moments.SLICE
    updates.run_adamw(_core(), memory, numbers, slice_elements, table, starts)


def sgd_update(
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Any],
    group: dict[str, Any],
    scaling: Scaling = UNSCALED,
    *,
    first: bool,
) -> None:
    """Do what `sgd.torch_update` does; the gradient is read only. All is on the CPU."""
    memory = _memory(parameter, gradient, state, group, scaling)
    if group["momentum"]:
        memory.first = address(state["momentum_buffer"])
    numbers = updates.SGDNumbers(
        float(group["lr"]),
        group["weight_decay"],
        group["momentum"],
        1 - group["dampening"],
        group["nesterov"],
        first,
    )
    updates.run_sgd(_core(), memory, numbers)


def _core() -> ctypes.CDLL:
    core = library.core()
    assert core is not None
    return core


def _memory(
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Any],
    group: dict[str, Any],
    scaling: Scaling,
) -> updates.Parameter:
    """Return a parameter's memory without its moments."""
    streamed = parameter.dtype in STREAMS
    master = group["master"] if streamed else "float32"
    memory = updates.Parameter(
        count=parameter.numel(),
        values_kind=updates.VALUES[parameter.dtype, master],
        gradient_kind=updates.GRADIENTS[gradient.dtype],
        factor=scaling.factor if streamed else 1.0,
        values=address(parameter),
        gradient=address(gradient),
    )
    if streamed:
        memory.master = address(state[masters.KEYS[master]])
    if scaling.coefficient is not None:
        memory.clipped, memory.coefficient = True, float(scaling.coefficient)
    return memory


def _adamw_numbers(group: dict[str, Any], step: float) -> updates.AdamWNumbers:
    """Return the numbers of a step, computed in double and rounded once, as PyTorch does."""
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    return updates.AdamWNumbers(
        keep=1 - lr * group["weight_decay"],
        weight1=1 - beta1,
        beta2=beta2,
        weight2=1 - beta2,
        root_correction=math.sqrt(1 - beta2**step),
        eps=group["eps"],
        step=lr / (1 - beta1**step),
    )
