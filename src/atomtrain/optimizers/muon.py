"""Muon for hidden matrices, AdamW for everything else, in one optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from atomtrain.errors import ConfigError, nearest
from atomtrain.optimizers import masters
from atomtrain.optimizers.base import HostOptimizer, check_adamw_group, check_momentum, check_rates
from atomtrain.optimizers.elementwise import ADAMW_PATHS, scratch_bytes
from atomtrain.optimizers.masters import wide_buffers
from atomtrain.optimizers.moments import part_bytes

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_EPS = 1e-7
_BANDS, _LEAST_ROWS = 4, 512
"""Of a symmetric product so many bands of rows are computed, each up to its block of the diagonal:
5/8 of it. More bands save little, since narrow ones are slower, and smaller matrices nothing."""
_ALGORITHMS = ("muon", "adamw")


class AdamWOptions(TypedDict, total=False):
    """What of `AdamW` groups with `algorithm` `adamw` take."""

    betas: tuple[float, float]
    eps: float
    state: str
    seed: int
    master: str


_ADAMW = AdamWOptions(betas=(0.9, 0.95), eps=1e-8, state="float32", seed=0, master="float32")


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
        **adamw: Unpack[AdamWOptions],
    ) -> None:
        """Make the optimizer; each argument but the first is the default of parameter groups.

        Args:
            params: Groups with `params` and `algorithm`: `muon` (matrices only) or `adamw`.
            lr: Learning rate of both; at least 0.
            weight_decay: Decoupled, of both.
            momentum: Of Muon, whose momentum is float32; at least 0, below 1.
            adamw: As `AdamW` takes them; `master` is that of Muon's matrices too.

        Raises:
            ConfigError: parameters without groups, a number out of range, or a parameter that is
                no matrix in a group of Muon.
            TypeError: another argument.
        """
        if unknown := sorted(adamw.keys() - _ADAMW.keys()):
            raise TypeError(f"Muon() got an unexpected keyword argument {unknown[0]!r}")
        numbers = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(params, {**numbers, **_ADAMW, **adamw})

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
        inner = 4 * _ITERATIONS - 3
        halved = 2 * sum((end - begin) * end for begin, end in _bands(short))
        return halved * (long + inner * short) + 2 * short * short * long

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
            ADAMW_PATHS.update(parameter, gradient, self.state[parameter], group, self.scaling)
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

    def _check_state(self, state: dict[str, Any], parameter: Tensor, group: dict[str, Any]) -> None:
        if group["algorithm"] == "adamw":
            ADAMW_PATHS.check(state, parameter, group)

    def _parts(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, int]:
        if group["algorithm"] == "adamw":
            return part_bytes(parameter, group["state"])
        return {"momentum_buffer": 4 * parameter.numel()}

    def _scratch_bytes(self, parameter: Tensor, group: dict[str, Any], *, on_gpu: bool) -> int:
        if group["algorithm"] == "adamw":
            return scratch_bytes(parameter, group, on_gpu=on_gpu)
        # What is made orthogonal, four matrices of its shorter side, and a block of the diagonal.
        # Of a stream all of the gradient, and of a split master, as float32.
        whole = 1 + wide_buffers(parameter, group["master"])
        short = min(parameter.shape)
        block = max((end - begin for begin, end in _bands(short)), default=0)
        return 4 * (whole * parameter.numel() + 4 * short**2 + block**2)


def orthogonalizer(matrix: Tensor) -> Tensor:
    """Return the symmetric `P` for which `P @ matrix` is nearly orthogonal (`matrix @ P` if tall).

    Five steps of the quintic Newton-Schulz iteration of Jordan et al. 2024,
    `X <- h(XX') X` with `h(g) = a + bg + cg^2`. Its coefficients favour speed over accuracy:
    singular values that are not tiny beside the largest end between about 0.7 and 1.2.

    All that happens to `X` is that polynomials of its first `XX'` are multiplied with it. They
    commute, so the steps are done with matrices of the shorter side: `P <- h(g) P` and
    `g <- h(g)^2 g`. Each of these is symmetric, so half of it is computed. Of `n` by `4n` that
    takes two fifths of the FLOPs of the steps as written, of `n` by `n` four fifths.

    Singular values far below the largest are lost in the rounding of `XX'`: of a gradient of rank
    1 the result is off by 4e-4, where the steps as written are by 7e-5, and in bfloat16 by 2.

    Args:
        matrix: `[A, B]` float32 of norm 1 at most; read only.
    """
    a, b, c = _COEFFICIENTS
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    product: Tensor
    gram, factor, product, spare = matrix.new_empty(4, wide.shape[0], wide.shape[0])
    _symmetric(wide, wide, out=gram)
    for step in range(_ITERATIONS):
        _symmetric(gram, gram, out=factor).mul_(c).add_(gram, alpha=b).diagonal().add_(a)
        if step == 0:
            product.copy_(factor)
        else:
            product, spare = _symmetric(product, factor, out=spare), product
        if step < _ITERATIONS - 1:
            _symmetric(_symmetric(gram, factor, out=spare), factor, out=gram)
    return product


def _symmetric(left: Tensor, right: Tensor, *, out: Tensor) -> Tensor:
    """Write `left @ right.T`, which is symmetric but for rounding; exactly so when it is written.

    What rounding leaves between the halves does not commute with the rest, and steps amplify it.
    """
    for begin, end in _bands(out.shape[0]):
        torch.mm(left[begin:end], right[:end].T, out=out[begin:end, :end])
        out[:begin, begin:end] = out[begin:end, :begin].T
        block = out[begin:end, begin:end].tril_()
        block.add_(block.tril(-1).T)
    return out


def _bands(rows: int) -> list[tuple[int, int]]:
    """Return the bands of rows in which a symmetric product is computed, each a begin and an end.

    They depend on nothing but the size, so bits do not depend on who computes.
    """
    height = rows if rows < _LEAST_ROWS else -(-rows // _BANDS)
    return [(begin, min(begin + height, rows)) for begin in range(0, rows, max(1, height))]


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
    ahead.div_(torch.linalg.vector_norm(ahead) + _EPS)
    made = orthogonalizer(ahead)
    lr = float(group["lr"])
    values.addmm_(
        *((made, ahead) if values.shape[0] <= values.shape[1] else (ahead, made)),
        beta=1 - lr * group["weight_decay"],
        alpha=-lr * 0.2 * math.sqrt(max(values.shape)),
    )
