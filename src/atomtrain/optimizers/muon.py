"""Muon for hidden matrices, AdamW for everything else, in one optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from atomtrain.errors import ConfigError, nearest
from atomtrain.optimizers import masters
from atomtrain.optimizers.adamw import PATHS, scratch_bytes
from atomtrain.optimizers.base import HostOptimizer, check_adamw_group, check_momentum, check_rates
from atomtrain.optimizers.masters import wide_buffers
from atomtrain.optimizers.moments import part_bytes

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_EPS = 1e-7
_ALGORITHMS = ("muon", "adamw")


class Muon(HostOptimizer):
    """Momentum whose update is made orthogonal (Jordan et al. 2024, kellerjordan.github.io).

    For a matrix `W` of `[A, B]` with gradient `G` and momentum `M` (both float32):

        M <- momentum * M + (1 - momentum) * G
        U  = (1 - momentum) * G + momentum * M
        W <- (1 - lr * weight_decay) * W - lr * 0.2 * sqrt(max(A, B)) * orthogonal(U)

    The factor `0.2 * sqrt(max(A, B))` gives the update the root mean square that AdamW's has, so
    both take the same learning rate and weight decay (Liu et al. 2025, arXiv 2502.16982).

    Each group says by `algorithm` which of the two updates it; `muon_groups` makes the groups.
    Groups of AdamW take its options, the formats of moments included. Parameters of 16 bits have
    exact masters (`HostOptimizer`), which are what `W` is then.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        state: str = "float32",
        seed: int = 0,
        master: str = "float32",
    ) -> None:
        """Make the optimizer; each argument but the first is the default of parameter groups.

        Args:
            params: Groups with `params` and `algorithm`: `muon` (matrices only) or `adamw`.
            lr: Learning rate of both; at least 0.
            weight_decay: Decoupled, of both.
            momentum: Of Muon; at least 0, below 1.
            betas: Of AdamW.
            eps: Of AdamW.
            state: Format of AdamW's moments; Muon's momentum is float32.
            seed: Of the random rounding of AdamW's moments.
            master: Format of the masters of bfloat16 parameters, as AdamW has it.

        Raises:
            ConfigError: parameters without groups, a number out of range, or a parameter that is
                no matrix in a group of Muon.
        """
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "betas": betas,
            "eps": eps,
            "state": state,
            "seed": seed,
            "master": master,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; it may have its own value of every argument of the constructor.

        Raises:
            ConfigError: it names no algorithm, or an argument is out of its range.
        """
        algorithm = param_group.get("algorithm") if isinstance(param_group, dict) else None
        if algorithm not in _ALGORITHMS:
            raise ConfigError(
                f"a group of Muon needs 'algorithm': 'muon' or 'adamw', not {algorithm!r}."
                f"{nearest(str(algorithm), _ALGORITHMS)} Make the groups with muon_groups(model)"
            )
        super().add_param_group(param_group)

    def flops_of(self, parameter: Tensor) -> int:
        """Return the FLOPs of the matrix products in a parameter's update."""
        if self._group_of(parameter)["algorithm"] != "muon":
            return 0
        short, long = sorted(parameter.shape)
        return _ITERATIONS * (4 * short * short * long + 2 * short**3)

    def _check(self, group: dict[str, Any]) -> None:
        if group["algorithm"] == "adamw":
            check_adamw_group(group)
            return
        check_rates(group)
        check_momentum(group)
        for parameter in group["params"]:
            if parameter.ndim != 2:
                raise ConfigError(
                    f"Muon updates matrices; a parameter of shape {list(parameter.shape)} belongs "
                    "in a group with 'algorithm': 'adamw', as muon_groups(model) makes it"
                )

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if group["algorithm"] == "adamw":
            PATHS.update(parameter, gradient, self.state[parameter], group, self.scaling)
            return
        scaling = self.scaling
        if scaling.coefficient is not None:
            gradient.mul_(scaling.coefficient)
        state = self.state[parameter]
        if parameter.dtype not in masters.STREAMS:
            _update_matrix(parameter, gradient, state, group)
            return
        stored = masters.stored_master(state, parameter, group["master"])
        values, wide = masters.read(parameter, stored), gradient.float()
        if scaling.factor != 1.0:
            wide = wide * scaling.factor
        _update_matrix(values, wide, state, group)
        masters.write(parameter, stored, values)

    def _parts(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, int]:
        if group["algorithm"] == "adamw":
            return part_bytes(parameter, group["state"])
        return {"momentum_buffer": 4 * parameter.numel()}

    def _scratch_bytes(self, parameter: Tensor, group: dict[str, Any], *, on_gpu: bool) -> int:
        if group["algorithm"] == "adamw":
            return scratch_bytes(parameter, group, on_gpu=on_gpu)
        # What is made orthogonal, the iterate and the next one; its square and a polynomial of
        # that. Of a stream all of the gradient, and of a split master, as float32.
        short, _ = sorted(parameter.shape)
        whole = 3 + wide_buffers(parameter, group["master"])
        return 4 * (whole * parameter.numel() + 2 * short * short)


def orthogonal(matrix: Tensor) -> Tensor:
    """Return a matrix of the same singular vectors whose singular values are all near 1.

    Five steps of the quintic Newton-Schulz iteration of Jordan et al. 2024,
    `X <- aX + bXX'X + c(XX')^2 X` from `X = matrix / |matrix|`, in float32. Its coefficients favour
    speed over accuracy: values that are not tiny beside the largest end between about 0.7 and 1.2.

    Args:
        matrix: `[A, B]` float32; read only. Zero gives zero.
    """
    a, b, c = _COEFFICIENTS
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x: Tensor = wide / (torch.linalg.vector_norm(wide) + _EPS)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


def _update_matrix(
    values: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]
) -> None:
    """Update float32 `values` of `[A, B]`, and the momentum in `state`."""
    if not set(state) - set(masters.KEYS.values()):
        state["momentum_buffer"] = torch.zeros_like(values)
    found = getattr(state.get("momentum_buffer"), "dtype", None)
    if found is not torch.float32:
        raise ConfigError(
            "the optimizer state of a matrix has no float32 momentum_buffer; continue with the "
            "optimizer that it was saved with"
        )
    momentum: Tensor = state["momentum_buffer"]
    momentum.lerp_(gradient, 1 - group["momentum"])
    ahead = gradient.lerp(momentum, group["momentum"])
    lr = float(group["lr"])
    values.mul_(1 - lr * group["weight_decay"])
    values.add_(orthogonal(ahead), alpha=-lr * 0.2 * math.sqrt(max(values.shape)))
