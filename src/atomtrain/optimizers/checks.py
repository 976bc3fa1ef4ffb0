"""What optimizers refuse, with one line that says what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from atomtrain.errors import ConfigError
from atomtrain.optimizers.masters import STREAMS, check_master, check_stream
from atomtrain.optimizers.moments import check_format

_DTYPES = (torch.float32, *STREAMS)
_UNKNOWN = ("maximize", "amsgrad")
"""What torch's optimizers can do to an update, and the host optimizers cannot."""


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


def check_gradient(gradient: Tensor) -> Tensor:
    """Return a gradient as contiguous memory, or raise a `ConfigError` if it is sparse."""
    if gradient.is_sparse:
        raise ConfigError("a gradient is sparse; use nn.Embedding(..., sparse=False)")
    return gradient.contiguous()
