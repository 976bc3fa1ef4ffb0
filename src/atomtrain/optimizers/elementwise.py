"""AdamW and SGD for the host, with exact masters of parameters of 16 bits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from atomtrain.errors import ConfigError
from atomtrain.optimizers import compiled, masters, moments
from atomtrain.optimizers.base import HostOptimizer, check_adamw_group, check_momentum, check_rates
from atomtrain.optimizers.compiled import Paths
from atomtrain.optimizers.masters import UNSCALED, Scaling, narrowed, wide_buffers, widened
from atomtrain.optimizers.moments import check_state, new_state, part_bytes

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]


class AdamW(HostOptimizer):
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) at memory bandwidth.

    With `state="float32"` it equals `torch.optim.AdamW(fused=True)` bit for bit and has the same
    state. The narrower formats (`atomtrain.optimizers.moments`) save 4 or 6 bytes a parameter; they
    are rounded at random by a pure function of seed, step and position, so a run gives the same
    bits whatever the number of threads, and goes on with the same bits when it is resumed.

    Parameters of 16 bits have exact masters (`HostOptimizer`).
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        state: str = "float32",
        seed: int = 0,
        master: str = "float32",
    ) -> None:
        """Make the optimizer; each argument but the first is the default of parameter groups.

        Args:
            params: Contiguous parameters of float32, bfloat16 or float16 on the CPU, or groups.
            lr: Learning rate; at least 0.
            betas: Decay of the first and the second moment a step; at least 0, below 1.
            eps: Added to the denominator; above 0.
            weight_decay: Decoupled: `lr * weight_decay` of a parameter is taken off each step.
            state: Format of the moments: `float32`, `bfloat16` or `int8`.
            seed: Of the random rounding; 0 to 2^63 - 1. Unused with `float32`.
            master: Format of the masters of bfloat16 parameters: `float32` or `split`, of 4 or 2
                bytes; both give the same bits. Float32 parameters need none.

        Raises:
            ConfigError: a number out of range, an unknown format, or a parameter that cannot be
                updated in place here.
        """
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "state": state,
            "seed": seed,
            "master": master,
        }
        super().__init__(params, defaults)

    def _check(self, group: dict[str, Any]) -> None:
        check_adamw_group(group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        ADAMW_PATHS.update(parameter, gradient, self.state[parameter], group, self.scaling)

    def _check_state(self, state: dict[str, Any], parameter: Tensor, group: dict[str, Any]) -> None:
        ADAMW_PATHS.check(state, parameter, group)

    def _parts(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, int]:
        return part_bytes(parameter, group["state"])

    def _scratch_bytes(self, parameter: Tensor, group: dict[str, Any], *, on_gpu: bool) -> int:
        return scratch_bytes(parameter, group, on_gpu=on_gpu)


def scratch_bytes(parameter: Tensor, group: dict[str, Any], *, on_gpu: bool) -> int:
    """Return the scratch that updating a parameter needs: none by the compiled core."""
    if not on_gpu and ADAMW_PATHS.compiled_for(parameter, parameter.dtype, group):
        return 0
    return moments.scratch_bytes(parameter, group, on_gpu=on_gpu)


def _prepare_adamw(
    state: dict[str, Any], parameter: Tensor, group: dict[str, Any]
) -> dict[str, Any]:
    if parameter.dtype in masters.STREAMS:
        masters.stored_master(state, parameter, group["master"])
    if "step" not in state:
        state.update(new_state(parameter, group["state"]))
    check_state(state, parameter, group["state"])
    return {}


ADAMW_PATHS = Paths(
    _prepare_adamw,
    moments.adamw_update,
    compiled.adamw_update,
    kind="state",
    fused=lambda group: group["state"] == "float32",
)
"""Also of what `Muon` leaves to AdamW."""


_MOMENTUM = "momentum_buffer"


class SGD(HostOptimizer):
    """Stochastic gradient descent, with momentum as `torch.optim.SGD` defines it.

    For a parameter `p` with gradient `g` and momentum `m` (float32; `m = g` at the first step):

        g <- g + weight_decay * p
        m <- momentum * m + (1 - dampening) * g
        p <- p - lr * m              (with `nesterov` p - lr * (g + momentum * m))

    It equals `torch.optim.SGD(fused=True)` bit for bit and has the same state. Weight decay is part
    of the gradient, not decoupled as AdamW's is. Parameters of 16 bits have exact masters
    (`HostOptimizer`).
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        master: str = "float32",
    ) -> None:
        """Make the optimizer; each argument but the first is the default of parameter groups.

        Args:
            params: Contiguous parameters of float32, bfloat16 or float16 on the CPU, or groups.
            lr: Learning rate; at least 0.
            momentum: At least 0, below 1; 0 keeps no state.
            dampening: Of what is added to the momentum; 0 to 1.
            weight_decay: Of the parameter that is added to its gradient; at least 0.
            nesterov: Whether the step looks ahead; with momentum and without dampening.
            master: Format of the masters of bfloat16 parameters, as AdamW has it.

        Raises:
            ConfigError: a number out of range, or a parameter that cannot be updated in place here.
        """
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "master": master,
        }
        super().__init__(params, defaults)

    def _check(self, group: dict[str, Any]) -> None:
        check_rates(group)
        check_momentum(group)
        if not 0 <= group["dampening"] <= 1:
            raise ConfigError(f"dampening must be from 0 to 1, not {group['dampening']}")
        if group["nesterov"] and (not group["momentum"] or group["dampening"]):
            raise ConfigError(
                "nesterov needs momentum above 0 and dampening 0, not "
                f"momentum={group['momentum']} and dampening={group['dampening']}"
            )

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        SGD_PATHS.update(parameter, gradient, self.state[parameter], group, self.scaling)

    def _check_state(self, state: dict[str, Any], parameter: Tensor, group: dict[str, Any]) -> None:
        SGD_PATHS.check(state, parameter, group)

    def _parts(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, int]:
        return {_MOMENTUM: 4 * parameter.numel()} if group["momentum"] else {}

    def _scratch_bytes(self, parameter: Tensor, group: dict[str, Any], *, on_gpu: bool) -> int:
        if not on_gpu and SGD_PATHS.compiled_for(parameter, parameter.dtype, group):
            return 0
        count = min(moments.pass_elements(on_gpu=on_gpu), parameter.numel())
        return 4 * wide_buffers(parameter, group["master"]) * count


def _prepare_sgd(state: dict[str, Any], parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
    """Make what there is not yet of a state, and check it; return whether it is the first step."""
    first = state.get(_MOMENTUM) is None
    if parameter.dtype in masters.STREAMS:
        masters.stored_master(state, parameter, group["master"])
    if not group["momentum"]:
        return {"first": first}
    if state.get(_MOMENTUM) is None and not set(state) - {*masters.KEYS.values(), _MOMENTUM}:
        state[_MOMENTUM] = torch.zeros(
            parameter.shape, dtype=torch.float32, device=parameter.device
        )
    if getattr(state.get(_MOMENTUM), "dtype", None) is not torch.float32:
        raise ConfigError(
            "the optimizer state has no float32 momentum_buffer; continue with the optimizer that "
            "it was saved with"
        )
    moments.check_place(state, _MOMENTUM, parameter.shape, parameter)
    return {"first": first}


def sgd_update(
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Any],
    group: dict[str, Any],
    scaling: Scaling = UNSCALED,
    *,
    first: bool,
) -> None:
    """Update a parameter and its state by one step; arguments as of `moments.adamw_update`.

    `first` says that it is the first step: then the momentum is the gradient.
    """
    if scaling.coefficient is not None:
        gradient.mul_(scaling.coefficient)
    momentum = [state[_MOMENTUM]] if group["momentum"] else []
    if parameter.dtype not in masters.STREAMS:
        _step(parameter, gradient, momentum, group, first=first)
        return
    whole = [parameter, gradient, state[masters.KEYS[group["master"]]], *momentum]
    at_once = moments.pass_elements(on_gpu=moments.slices_at_once(parameter.device) > 1)
    passes = (tensor.view(-1).split(at_once) for tensor in whole)
    for stream, narrow, master, *some in zip(*passes, strict=True):
        values, wide = widened(stream, narrow, master, scaling.factor)
        _step(values, wide, some, group, first=first)
        narrowed(stream, master, values, wide)


def _step(
    values: Tensor, gradient: Tensor, momentum: list[Tensor], group: dict[str, Any], *, first: bool
) -> None:
    torch._fused_sgd_(
        [values], [gradient], momentum,
        lr=float(group["lr"]), momentum=group["momentum"], dampening=group["dampening"],
        weight_decay=group["weight_decay"], nesterov=group["nesterov"], maximize=False,
        is_first_step=first,
    )  # fmt: skip


SGD_PATHS = Paths(
    _prepare_sgd, sgd_update, compiled.sgd_update, kind="nesterov", fused=lambda group: True
)
