"""AdamW for the host, with moments in float32, bfloat16 or 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from atomtrain.errors import ConfigError
from atomtrain.optimizers.checks import check_adamw_group, check_gradient, check_parameters
from atomtrain.optimizers.moments import adamw_update, cast_state, check_state, new_state

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]


class AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) at memory bandwidth.

    With `state="float32"` it equals `torch.optim.AdamW(fused=True)` bit for bit and has the same
    state. The narrower formats (`atomtrain.optimizers.moments`) save 4 or 6 bytes a parameter; they
    are rounded at random by a pure function of seed, step and position, so a run gives the same
    bits whatever the number of threads, and goes on with the same bits when it is resumed.

    Each parameter is updated independently of all others, as the engine requires.
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
    ) -> None:
        """Make the optimizer; each argument but the first is the default of parameter groups.

        Args:
            params: Contiguous float32 parameters on the CPU, or groups of them.
            lr: Learning rate; at least 0.
            betas: Decay of the first and the second moment a step; at least 0, below 1.
            eps: Added to the denominator; above 0.
            weight_decay: Decoupled: `lr * weight_decay` of a parameter is taken off each step.
            state: Format of the moments: `float32`, `bfloat16` or `int8`.
            seed: Of the random rounding; 0 to 2^63 - 1. Unused with `float32`.

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
        }
        check_adamw_group(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; it may have its own value of every argument of the constructor."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_adamw_group(group)
            check_parameters(group["params"])
        except ConfigError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; returns the loss of `closure`, if given.

        Raises:
            ConfigError: a state that was loaded is of another format, or a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update_one(self.state, parameter, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, exactly; also that of torch's AdamW."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for key in ("state", "seed"):
                group.setdefault(key, self.defaults[key])
            for parameter in group["params"]:
                if parameter in self.state:
                    cast_state(self.state[parameter], group["state"])


def update_one(
    states: dict[Tensor, dict[str, Any]], parameter: Tensor, group: dict[str, Any]
) -> None:
    """Make the state of a parameter if there is none, check it, and update by AdamW."""
    assert parameter.grad is not None
    gradient = check_gradient(parameter.grad)
    state = states[parameter]
    if not state:
        state.update(new_state(parameter, group["state"]))
    check_state(state, group["state"])
    adamw_update(parameter, gradient, state, group)
