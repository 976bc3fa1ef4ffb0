"""AdamW for the host: moments in float32, bfloat16 or 8 bits; exact masters of bfloat16."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from atomtrain.errors import ConfigError
from atomtrain.optimizers import masters
from atomtrain.optimizers.checks import check_adamw_group, check_gradient, check_parameters
from atomtrain.optimizers.moments import (
    adamw_update,
    check_state,
    free_scratch,
    new_state,
    part_bytes,
    scratch_bytes,
)

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]
_DTYPES = (torch.float32, *masters.STREAMS)


class AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) at memory bandwidth.

    With `state="float32"` it equals `torch.optim.AdamW(fused=True)` bit for bit and has the same
    state. The narrower formats (`atomtrain.optimizers.moments`) save 4 or 6 bytes a parameter; they
    are rounded at random by a pure function of seed, step and position, so a run gives the same
    bits whatever the number of threads, and goes on with the same bits when it is resumed.

    A parameter of bfloat16 or float16 is the stream of an exact float32 master
    (`atomtrain.optimizers.masters`), which lies in the state. At first it is the parameter's own
    value, or what `set_master` says.

    Each parameter is updated independently of all others, as the engine requires.
    """

    gradient_factor = 1.0
    """What gradients of parameters with masters are multiplied by, as float32, before they are
    used: where the loss was scaled, its inverse."""

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
        _check_group(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; it may have its own value of every argument of the constructor."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_group(group)
            check_parameters(group["params"], _DTYPES)
            for parameter in group["params"]:
                masters.check_stream(parameter.dtype, group["master"])
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
                    update_one(self.state, parameter, group, self.gradient_factor)
        return loss

    @torch.no_grad()
    def master_of(self, parameter: Tensor) -> Tensor:
        """Return a bfloat16 parameter's master as float32.

        It is the memory itself where the master is `float32` and has been set or updated, else a
        copy: read only.
        """
        state = self.state.get(parameter, {})
        key = masters.KEYS[self._group_of(parameter)["master"]]
        return masters.read(parameter, state[key]) if key in state else parameter.float()

    @torch.no_grad()
    def set_master(self, parameter: Tensor, values: Tensor) -> None:
        """Set a bfloat16 parameter's master, and the parameter to it, rounded.

        Args:
            parameter: Of this optimizer.
            values: float32 of the parameter's shape, contiguous. A `float32` master that there was
                not before takes over this very memory.
        """
        kind = self._group_of(parameter)["master"]
        state, key = self.state[parameter], masters.KEYS[kind]
        if key not in state and kind == "float32":
            state[key] = values
        elif key not in state:
            state.update(masters.new_master(parameter, kind))
        masters.write(parameter, state[key], values)

    def master_keys(self) -> frozenset[str]:
        """Return the keys of a parameter's state that are its master, not moments."""
        return frozenset(masters.KEYS.values())

    def state_bytes_of(self, parameter: Tensor) -> int:
        """Return the bytes that the parameter's moments and master take, now or later."""
        return sum(self.state_parts_of(parameter).values())

    def state_parts_of(self, parameter: Tensor) -> dict[str, int]:
        """Return the bytes of each tensor of the parameter's state, now or later; no scalars."""
        group = self._group_of(parameter)
        parts = part_bytes(parameter, group["state"])
        if parameter.dtype in masters.STREAMS:
            master = group["master"]
            parts[masters.KEYS[master]] = int(masters.MASTER_BYTES[master]) * parameter.numel()
        return parts

    def scratch_bytes(self, *, on_gpu: bool = False) -> int:
        """Return the bytes of scratch memory that updates need, beside the state; `on_gpu` more is
        updated at once."""
        return max(
            (
                scratch_bytes(p, group, on_gpu=on_gpu)
                for group in self.param_groups
                for p in group["params"]
            ),
            default=0,
        )

    def free_scratch(self) -> None:
        """Free the scratch that the calling thread keeps for its next update."""
        free_scratch()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, exactly; also that of torch's AdamW."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for key in ("state", "seed", "master"):
                group.setdefault(key, self.defaults[key])
        # The base class casts to the type of the parameter, which is not exact.
        saved = itertools.chain.from_iterable(g["params"] for g in state_dict["param_groups"])
        own = itertools.chain.from_iterable(g["params"] for g in self.param_groups)
        for number, parameter in zip(saved, own, strict=True):
            if number in state_dict["state"]:
                values = state_dict["state"][number]
                self.state[parameter] = {
                    key: value.clone() if isinstance(value, Tensor) else value
                    for key, value in values.items()
                }

    def _group_of(self, parameter: Tensor) -> dict[str, Any]:
        for group in self.param_groups:
            if any(parameter is member for member in group["params"]):
                return group
        raise ConfigError(
            f"a parameter of shape {list(parameter.shape)} is not in this optimizer; add a group "
            "with it"
        )


def update_one(
    states: dict[Tensor, dict[str, Any]],
    parameter: Tensor,
    group: dict[str, Any],
    gradient_factor: float = 1.0,
) -> None:
    """Make the state of a parameter if there is none, check it, and update by AdamW."""
    assert parameter.grad is not None
    gradient = check_gradient(parameter.grad)
    state = states[parameter]
    streamed = parameter.dtype in masters.STREAMS
    if not state and streamed:
        state.update(masters.new_master(parameter, group["master"]))
    if "step" not in state:
        state.update(new_state(parameter, group["state"]))
    check_state(state, group["state"])
    if streamed:
        masters.check_stored(state, parameter, group["master"])
    adamw_update(parameter, gradient, state, group, gradient_factor)


def _check_group(group: dict[str, Any]) -> None:
    check_adamw_group(group)
    masters.check_master(group["master"])
