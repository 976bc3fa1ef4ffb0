"""The optimizers that a run can name, and what they take of the host's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from atomtrain.errors import ConfigError, nearest
from atomtrain.optimizers import BYTES_PER_PARAMETER, AdamW, Muon, decay_groups, muon_groups

if TYPE_CHECKING:
    from atomtrain.training.recipe import Recipe

_BETAS = (0.9, 0.95)
"""As GPT-3 (Brown et al. 2020, appendix B)."""
_FORMATS = {
    "adamw": "float32",
    "adamw-bfloat16": "bfloat16",
    "adamw-int8": "int8",
    "muon": "float32",
}
"""Format of AdamW's moments by the optimizer's name."""
SMALLEST_STATE = "adamw-int8"
"""The optimizer that takes the least memory."""
_PARAMETER_AND_GRADIENT_BYTES = 8


def check_optimizer(name: str) -> None:
    """Raise a `ConfigError` if there is no optimizer of this name."""
    if name not in _FORMATS:
        raise ConfigError(
            f"there is no optimizer {name!r}.{nearest(name, _FORMATS)} "
            f"Optimizers: {', '.join(_FORMATS)}"
        )


def host_bytes_per_parameter(name: str) -> float:
    """Return the host bytes of a parameter, its gradient and its optimizer state.

    For `muon` it is the most: a matrix that Muon updates takes 4 bytes less.
    """
    return _PARAMETER_AND_GRADIENT_BYTES + BYTES_PER_PARAMETER[_FORMATS[name]]


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Return the recipe's optimizer of all of a model's trainable parameters."""
    options: dict[str, Any] = {
        "lr": recipe.learning_rate,
        "weight_decay": recipe.weight_decay,
        "betas": _BETAS,
    }
    if recipe.optimizer == "muon":
        return Muon(muon_groups(model, recipe.weight_decay), **options)
    groups = decay_groups(model, recipe.weight_decay)
    return AdamW(groups, state=_FORMATS[recipe.optimizer], seed=recipe.seed, **options)
