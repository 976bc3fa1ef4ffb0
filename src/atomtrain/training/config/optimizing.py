"""The optimizers that a run can name, and what they take of the host's memory.

What is imported here knows names only: mistakes are told before torch is there.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Literal, cast

from atomtrain.errors import ConfigError, nearest

if TYPE_CHECKING:
    import torch
    from torch import nn

BETAS = (0.9, 0.95)
"""As GPT-3 (Brown et al. 2020, appendix B)."""
_FORMATS = {
    "adamw": "float32",
    "adamw-split": "float32",
    "adamw-bfloat16": "bfloat16",
    "adamw-bfloat16-split": "bfloat16",
    "adamw-int8": "int8",
}
"""Format of the moments by AdamW's name."""
_SGD_MOMENTUM = 0.9
AUTO = "auto"
"""Stands for the precision that the device computes fast; no recipe holds it."""
_PARAMETER_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""By precision; of a gradient too."""
_WIDER_GRADIENT_BYTES = 2
"""What float32 gradients take more than those of 16 bits."""
GRADIENT_DTYPES = ("float32",)
_MASTERS = {
    "adamw": "float32",
    "adamw-split": "split",
    "adamw-bfloat16": "float32",
    "adamw-bfloat16-split": "split",
    "adamw-int8": "split",
    "muon": "float32",
    "sgd": "float32",
}
"""Format of the masters with precision bf16, by the optimizer's name: both give the same bits, and
who wants the least state wants the split."""
_SPLITS = {"adamw-split": "adamw", "adamw-bfloat16-split": "adamw-bfloat16"}
"""The optimizers that differ in their split masters only, and what they are without."""


def check_optimizer(name: str) -> None:
    """Raise a `ConfigError` if there is no optimizer of this name."""
    if name not in _MASTERS:
        raise ConfigError(
            f"there is no optimizer {name!r}.{nearest(name, _MASTERS)} "
            f"Optimizers: {', '.join(_MASTERS)}"
        )


def check_precision_choice(name: str) -> None:
    """Raise a `ConfigError` if a user cannot choose this precision."""
    _check_precision_name(name, (AUTO, *_PARAMETER_BYTES))


def check_precision(precision: str, optimizer: str) -> None:
    """Raise a `ConfigError` if there is no such precision, or not with this optimizer."""
    _check_precision_name(precision, _PARAMETER_BYTES)
    if precision != "bf16" and optimizer in _SPLITS:
        raise ConfigError(
            f"the optimizer {optimizer!r} splits float32 masters into bfloat16 and a rest, and "
            f"precision {precision} has none that can be split; choose precision bf16, or the "
            f"optimizer {_SPLITS[optimizer]!r}"
        )


def _check_precision_name(name: str, allowed: Collection[str]) -> None:
    if name not in allowed:
        raise ConfigError(
            f"there is no precision {name!r}.{nearest(name, allowed)} "
            f"Precisions: {', '.join(allowed)}"
        )


def train_alike(name: str, other: str) -> bool:
    """Return whether two optimizers give the same bits and a run may change from one to another."""
    return _SPLITS.get(name, name) == _SPLITS.get(other, other)


def check_gradient_dtype(name: str | None) -> None:
    """Raise a `ConfigError` if gradients cannot be of this type; `None` is the parameters' own."""
    if name not in (None, *GRADIENT_DTYPES):
        raise ConfigError(
            f"there is no gradient type {name!r}.{nearest(str(name), GRADIENT_DTYPES)} "
            f"Gradient types: {', '.join(GRADIENT_DTYPES)}, or none for that of the parameters"
        )


def gradient_dtype_of(name: str | None) -> Literal["float32"] | None:
    """Return what the engine calls a recipe's type of gradients."""
    return cast(Literal["float32"] | None, name)


def host_bytes_per_parameter(
    name: str, precision: str = "fp32", gradient_dtype: str | None = None, *, spent: bool = False
) -> float:
    """Return the host bytes of a parameter, its gradient and its optimizer state.

    With `spent` gradients take no place of their own; what they wait in does not grow with depth.
    For `muon` it is the most: a matrix that Muon updates takes 4 bytes less.
    """
    from atomtrain.optimizers import BYTES_PER_PARAMETER, MASTER_BYTES

    masters = 0.0 if precision == "fp32" else MASTER_BYTES[_master_format(name, precision)]
    moments = 4.0 if name == "sgd" else BYTES_PER_PARAMETER[_FORMATS.get(name, "float32")]
    widened = gradient_dtype is not None and precision != "fp32"
    gradients = 0 if spent else _PARAMETER_BYTES[precision] + _WIDER_GRADIENT_BYTES * widened
    return _PARAMETER_BYTES[precision] + gradients + masters + moments


def smaller_states(
    name: str, precision: str = "fp32", gradient_dtype: str | None = None, *, spent: bool = False
) -> dict[str, float]:
    """Return AdamW's forms that take less memory at this precision, largest first, and their bytes
    of `host_bytes_per_parameter`."""

    def taken_bytes(other: str) -> float:
        return host_bytes_per_parameter(other, precision, gradient_dtype, spent=spent)

    forms = [one for one in _FORMATS if precision == "bf16" or one not in _SPLITS]
    less = {one: taken_bytes(one) for one in forms if taken_bytes(one) < taken_bytes(name)}
    return dict(sorted(less.items(), key=lambda one: -one[1]))


def _master_format(name: str, precision: str) -> str:
    """Return the format of the masters; only bfloat16 can be split off a float32."""
    return "float32" if precision == "fp16" else _MASTERS[name]


def precision_of(name: str) -> Literal["bf16", "fp16"] | None:
    """Return what the engine calls a recipe's precision."""
    return None if name == "fp32" else cast(Literal["bf16", "fp16"], name)


def named_optimizer(
    model: nn.Module,
    name: str,
    precision: str = "fp32",
    *,
    learning_rate: float = 1e-3,
    weight_decay: float = 0.1,
    layer_lr_decay: float = 1.0,
    seed: int = 0,
) -> torch.optim.Optimizer:
    """Return an optimizer by name, of all of a model's trainable parameters.

    The model may be on the meta device, for the optimizer's sizes.
    """
    from atomtrain.optimizers import SGD, AdamW, Muon, decay_groups, layer_groups, muon_groups

    divide = muon_groups if name == "muon" else decay_groups
    groups = layer_groups(model, divide(model, weight_decay), layer_lr_decay, learning_rate)
    options: dict[str, Any] = {"lr": learning_rate, "master": _master_format(name, precision)}
    if name == "muon":
        return Muon(groups, betas=BETAS, weight_decay=weight_decay, **options)
    if name == "sgd":
        return SGD(groups, momentum=_SGD_MOMENTUM, **options)
    state = _FORMATS[name]
    return AdamW(groups, betas=BETAS, state=state, seed=seed, **options)
