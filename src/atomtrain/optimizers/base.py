"""What the host optimizers have in common: checked groups, exact masters, sizes told beforehand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from atomtrain.errors import ConfigError
from atomtrain.optimizers import masters
from atomtrain.optimizers.masters import STREAMS, Scaling, check_master, check_stream, free_scratch
from atomtrain.optimizers.moments import check_format

_DTYPES = (torch.float32, *STREAMS)
_UNKNOWN = ("maximize", "amsgrad")
"""What torch's optimizers can do to an update, and the host optimizers cannot."""


class HostOptimizer(torch.optim.Optimizer):
    """Updates each parameter independently of all others, as the engine requires.

    A parameter of bfloat16 or float16 is the stream of an exact float32 master
    (`atomtrain.optimizers.masters`), which lies in the state. At first it is the parameter's own
    value, or what `set_master` says.
    """

    gradient_factor = 1.0
    """What gradients of parameters with masters are multiplied by, as float32, before they are
    used: where the loss was scaled, its inverse."""
    clip_coefficient: Tensor | None = None
    """What gradients are multiplied by before that, in their own type, a single number: the bits of
    `torch.nn.utils.clip_grad_norm_` without its pass over memory. `None` is 1. Gradients may be
    overwritten then."""

    @property
    def scaling(self) -> Scaling:
        """What gradients are multiplied by in the next step."""
        coefficient = self.clip_coefficient
        if coefficient is not None and float(coefficient) == 1.0:
            coefficient = None
        return Scaling(self.gradient_factor, coefficient)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; it may have its own value of every argument of the constructor.

        Raises:
            ConfigError: an argument is out of its range, or a parameter cannot be updated here.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check(group)
            check_parameters(group["params"], group["master"])
        except ConfigError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; returns the loss of `closure`, if given.

        Raises:
            ConfigError: a state that was loaded is of another format, or a gradient is sparse or
                not of its parameter's shape; nothing has been written then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updated = [
            (parameter, parameter.grad, group)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        for parameter, gradient, group in updated:
            check_gradient(parameter, gradient)
            if state := self.state.get(parameter):
                self._check_state(state, parameter, group)
        for parameter, gradient, group in updated:
            self._update(parameter, gradient.contiguous(), group)
        return loss

    @torch.no_grad()
    def master_of(self, parameter: Tensor) -> Tensor:
        """Return the master of a parameter of 16 bits as float32.

        It is the memory itself where the master is `float32` and has been set or updated, else a
        copy: read only.
        """
        state = self.state.get(parameter, {})
        key = masters.KEYS[self._group_of(parameter)["master"]]
        return masters.read(parameter, state[key]) if key in state else parameter.float()

    @torch.no_grad()
    def set_master(self, parameter: Tensor, values: Tensor) -> None:
        """Set the master of a parameter of 16 bits, and the parameter to it, rounded.

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
        """Return the keys of a parameter's state that are its master, nothing else of it."""
        return frozenset(masters.KEYS.values())

    def state_bytes_of(self, parameter: Tensor) -> int:
        """Return the bytes that a parameter's whole state takes, now or later."""
        return sum(self.state_parts_of(parameter).values())

    def state_parts_of(self, parameter: Tensor) -> dict[str, int]:
        """Return the bytes of each tensor of the parameter's state, now or later; no scalars."""
        group = self._group_of(parameter)
        parts = self._parts(parameter, group)
        if parameter.dtype in masters.STREAMS:
            master = group["master"]
            parts[masters.KEYS[master]] = int(masters.MASTER_BYTES[master]) * parameter.numel()
        return parts

    def scratch_bytes(self, *, on_gpu: bool = False) -> int:
        """Return the bytes of scratch memory that updates need, beside the state; `on_gpu` more is
        updated at once."""
        return max(
            (
                self._scratch_bytes(parameter, group, on_gpu=on_gpu)
                for group in self.param_groups
                for parameter in group["params"]
            ),
            default=0,
        )

    def free_scratch(self) -> None:
        free_scratch()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, exactly; also that of torch's own optimizer of the
        same name.

        Raises:
            ConfigError: it did what is not done here; nothing is changed.
        """
        check_saved_groups(state_dict["param_groups"])
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
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

    def _check(self, group: dict[str, Any]) -> None:
        raise NotImplementedError

    # The state is made if there is none.
    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def _check_state(self, state: dict[str, Any], parameter: Tensor, group: dict[str, Any]) -> None:
        """Refuse a state that is not that of the parameter and the group; write nothing."""

    # Bytes of each tensor of the state but the master.
    def _parts(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, int]:
        raise NotImplementedError

    def _scratch_bytes(self, parameter: Tensor, group: dict[str, Any], *, on_gpu: bool) -> int:
        raise NotImplementedError

    def _group_of(self, parameter: Tensor) -> dict[str, Any]:
        for group in self.param_groups:
            if any(parameter is member for member in group["params"]):
                return group
        raise ConfigError(
            f"a parameter of shape {list(parameter.shape)} is not in this optimizer; add a group "
            "with it"
        )


def check_adamw_group(group: Mapping[str, Any]) -> None:
    """Raise a `ConfigError` if a number of AdamW is out of range."""
    check_rates(group)
    betas = group["betas"]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(f"betas must be two numbers of at least 0 and below 1, not {betas}")
    if not 0 < group["eps"] < math.inf:
        raise ConfigError(f"eps must be above 0, such as 1e-8, not {group['eps']}")
    check_format(group["state"])
    seed = group["seed"]
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ConfigError(f"seed must be a whole number from 0 to 2^63 - 1, not {seed!r}")


def check_rates(group: Mapping[str, Any]) -> None:
    """Raise a `ConfigError` if learning rate or weight decay is out of range."""
    for name in ("lr", "weight_decay"):
        if not 0 <= float(group[name]) < math.inf:
            raise ConfigError(f"{name} must be at least 0 and finite, not {float(group[name])}")


def check_momentum(group: Mapping[str, Any]) -> None:
    """Raise a `ConfigError` if the momentum is out of range."""
    if not 0 <= group["momentum"] < 1:
        raise ConfigError(f"momentum must be at least 0 and below 1, not {group['momentum']}")


def check_parameters(parameters: Iterable[Tensor], master: str) -> None:
    """Raise a `ConfigError` if a parameter cannot be updated in place on the host, or cannot have
    masters of this format."""
    check_master(master)
    for parameter in parameters:
        shape = list(parameter.shape)
        if parameter.dtype not in _DTYPES:
            allowed = " and ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
            raise ConfigError(
                f"a parameter of shape {shape} is {parameter.dtype}; this host optimizer updates "
                f"{allowed} only: convert the model with model.float()"
            )
        # On the meta device nothing is ever updated: there one may ask for sizes.
        if parameter.device.type not in ("cpu", "meta"):
            raise ConfigError(
                f"a parameter of shape {shape} is on {parameter.device}; the host optimizers "
                "update on the CPU: use those of torch.optim there"
            )
        if not parameter.is_contiguous():
            raise ConfigError(
                f"a parameter of shape {shape} is not contiguous in memory; make it so with "
                "parameter.data = parameter.data.contiguous()"
            )
        check_stream(parameter.dtype, master)


def check_saved_groups(groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise a `ConfigError` if a saved optimizer did what the host optimizers cannot do."""
    for group in groups:
        for name in _UNKNOWN:
            if group.get(name):
                raise ConfigError(
                    f"the saved optimizer has {name}={group[name]}, which the host optimizers "
                    "cannot do; continue with that of torch.optim"
                )


def check_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Check that a gradient can update a parameter.

    Raises:
        ConfigError: it is sparse, or of another type or shape, or one of both is misaligned.
    """
    if gradient.is_sparse:
        raise ConfigError("a gradient is sparse; use nn.Embedding(..., sparse=False)")
    allowed = _DTYPES if parameter.dtype in STREAMS else (torch.float32,)
    if gradient.shape != parameter.shape or gradient.dtype not in allowed:
        raise ConfigError(
            f"a gradient of shape {list(gradient.shape)} and {gradient.dtype} cannot update a "
            f"parameter of shape {list(parameter.shape)} and {parameter.dtype}; give it the "
            "parameter's own shape and type"
        )
    masters.check_aligned(parameter, "a parameter")
    masters.check_aligned(gradient, "a gradient")
