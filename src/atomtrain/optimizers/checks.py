"""What optimizers refuse, with one line that says what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from atomtrain.errors import ConfigError
from atomtrain.optimizers.moments import check_format


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


def check_parameters(parameters: Iterable[Tensor], dtypes: Sequence[torch.dtype]) -> None:
    """Raise a `ConfigError` if a parameter cannot be updated in place on the host."""
    for parameter in parameters:
        shape = list(parameter.shape)
        if parameter.dtype not in dtypes:
            allowed = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
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


def check_gradient(gradient: Tensor) -> Tensor:
    """Return a gradient as contiguous memory, or raise a `ConfigError` if it is sparse."""
    if gradient.is_sparse:
        raise ConfigError("a gradient is sparse; use nn.Embedding(..., sparse=False)")
    return gradient.contiguous()
