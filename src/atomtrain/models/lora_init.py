"""How an adapter of a linear layer begins: at nothing, or with the main part of its matrix.

An adapter that begins with a part of the matrix takes it out of the frozen one, so that the model
says the same at first: `W = (W - scale * B A) + scale * B A`. As peft's `init_lora_weights`:

- `pissa` (Meng et al. 2024): the `r` largest singular values with their vectors;
- `pissa_niter_N`: the same, as nearly as N rounds of subspace iteration find it: much faster;
- `olora` (Büyükakyüz 2024): the first `r` columns of Q and rows of R of `W = Q R`.

Everything is computed in float64 and rounded once. So it can be computed again, elsewhere too, from
the matrix and a seed: no checkpoint holds it. Beside the matrix memory holds its copy in float64,
for `pissa` also four to five times the square of its smaller side.
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

import torch
from torch import Tensor

from atomtrain.errors import ConfigError, DataError
from atomtrain.models.lora_config import OLORA, PISSA, LoraConfig, rounds_of
from atomtrain.models.weights.files import is_finite

_LEAST_GAP = 1e-11
"""Between the squares of two singular values, as a share of the largest: closer ones cannot be told
apart, so another computer could take the other one."""


class Begun(NamedTuple):
    """An adapter before its first step, float32."""

    a: Tensor
    """`[r, I]`."""
    b: Tensor
    """`[O, r]`."""

    def within(self, weight: Tensor, scale: float) -> Tensor:
        """Return a matrix `[O, I]` with the adapter in it; with `-scale`, taken out of it."""
        return torch.addmm(weight, self.b, self.a, alpha=scale)


def begin(weight: Tensor, config: LoraConfig, seed: str) -> Begun:
    """Return how the adapter of a matrix begins, where it begins with a part of it.

    Args:
        weight: `[O, I]` float32.
        config: Of the adapter.
        seed: Decides where the iteration of `pissa_niter_N` begins.

    Raises:
        ConfigError: what it would begin with is not unique.
        DataError: the matrix has values that are not numbers.
    """
    if not is_finite(weight):
        raise DataError(
            f"a matrix of {list(weight.shape)} has values that are not numbers (NaN or infinite), "
            f"of which --lora init={config.init} finds no main part; restore the model's weights"
        )
    wide = weight.double()
    b, a = _main_part(wide, config, seed)
    root = math.sqrt(config.scale)
    if config.init == OLORA:  # peft takes out `scale` times what it begins with
        root = 1.0
    return Begun((a / root).float(), (b / root).float())


def drawn(shape: torch.Size, seed: str) -> Tensor:
    """Return `A` as peft draws it, `[r, I]` float32, where `B` is zero."""
    bound = 1 / math.sqrt(shape[1])  # kaiming_uniform_ with a = sqrt(5)
    return torch.empty(shape).uniform_(-bound, bound, generator=generator_of(seed))


def _main_part(weight: Tensor, config: LoraConfig, seed: str) -> tuple[Tensor, Tensor]:
    if config.init == OLORA:
        q, _ = torch.linalg.qr(weight[:, : config.r])
        return q, q.mT @ weight
    rounds = rounds_of(config.init)
    if weight.shape[0] > weight.shape[1]:
        right, left = _vectors(weight.mT, config.r, rounds, seed)
        return left.mT, right.mT
    return _vectors(weight, config.r, rounds, seed)


def _vectors(weight: Tensor, r: int, rounds: int | None, seed: str) -> tuple[Tensor, Tensor]:
    """Return `U sqrt(S)` and `sqrt(S) V^T` of the `r` largest singular values."""
    if rounds is None:
        squares, vectors = torch.linalg.eigh(weight @ weight.mT)  # in ascending order
        u = vectors[:, -r:].flip(1)
        if r < len(squares) and _close(squares, r):
            raise ConfigError(
                f"--lora init={PISSA} takes the {r} largest singular values of every matrix, and "
                f"in one of {list(weight.shape)} the next is as large; give another r, or "
                f"init={PISSA}_niter_16"
            )
    else:
        shape = (weight.shape[1], r)
        start = torch.randn(shape, generator=generator_of(seed), dtype=weight.dtype)
        basis, _ = torch.linalg.qr(weight @ start)
        for _ in range(rounds):
            basis, _ = torch.linalg.qr(weight @ (weight.mT @ basis))
        inner, _, _ = torch.linalg.svd(basis.mT @ weight, full_matrices=False)
        u = basis @ inner
    rest = u.mT @ weight  # S V^T
    roots = rest.norm(dim=1).sqrt()
    return u * roots, rest / roots.clamp(min=torch.finfo(roots.dtype).tiny)[:, None]


def _close(squares: Tensor, r: int) -> bool:
    taken, left, largest = squares[-r], squares[-r - 1], squares[-1] * _LEAST_GAP
    return bool(taken > largest and taken - left < largest)


def generator_of(seed: str) -> torch.Generator:
    key = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little") >> 1
    return torch.Generator().manual_seed(key)
