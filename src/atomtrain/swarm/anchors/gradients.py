"""The `gradient` way: peers accumulate gradients, a round averages them, and all step together.

The step is what a round applies to the anchor, with the optimizer's moments in the place of the
outer update's velocity. So they are versioned, hashed, fetched and saved with the anchor, and the
parameters of all members are equal bit for bit after each step: an anchor's version is the number
of steps that made it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from atomtrain.swarm.anchors.anchor_store import FragmentAccess
from atomtrain.swarm.anchors.outer import Place
from atomtrain.swarm.codecs.slices import Span


class GradientAccess(FragmentAccess, Protocol):
    """How the swarm reaches a model whose gradients are averaged."""

    def gradient(self, index: int) -> AbstractContextManager[torch.Tensor]:
        """Lend the mean gradient, 1-D float32, since `forget`; not to be changed."""
        ...

    def forget(self, index: int) -> None:
        """Begin to accumulate anew: the parameters have moved."""
        ...


@dataclass(frozen=True, kw_only=True)
class AdamWUpdate:
    """AdamW (Loshchilov and Hutter 2019), as `torch.optim.AdamW` computes it.

    One correctly rounded operation after the other, and powers by products alone: every machine
    computes the same bits.
    """

    learning_rate_at: Callable[[int], float]
    """Learning rate by the number of steps before."""
    decayed: Sequence[Sequence[Span]]
    """By fragment: the elements that weight decay concerns."""
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    rows: int = 2

    def admits(self, velocity: torch.Tensor) -> bool:
        """Say whether no second moment is negative: its root is taken."""
        return bool((velocity.view(self.rows, -1)[1] >= 0).all())

    def apply(
        self,
        anchor: torch.Tensor,
        mean: torch.Tensor,
        velocity: torch.Tensor | None,
        on_time_share: float = 1.0,
        out: torch.Tensor | None = None,
        *,
        place: Place,
    ) -> None:
        """Write the stepped `anchor` to `out`, and change both moments, the rows of `velocity`.

        `out` may be `mean`.
        """
        assert velocity is not None, "AdamW needs its moments"
        out = anchor if out is None else out
        first, second = velocity
        beta1, beta2 = self.betas
        rate = self.learning_rate_at(place.version)
        first.mul_(beta1).add_(mean.mul(1.0 - beta1))
        second.mul_(beta2).add_(mean.mul(mean).mul_(1.0 - beta2))
        out.copy_(anchor)  # not before: it may be the mean
        for start, stop in self.decayed[place.fragment]:
            inside = slice(max(0, start - place.start), max(0, stop - place.start))
            out[inside].mul_(1.0 - rate * self.weight_decay)
        root = math.sqrt(1.0 - _power(beta2, place.version + 1))
        size = second.sqrt().div_(root).add_(self.eps)
        unbiased = rate / (1.0 - _power(beta1, place.version + 1))
        out.sub_(first.div(size).mul_(unbiased))


def _power(base: float, exponent: int) -> float:
    """Return a power by squaring; library functions may differ in their last bit."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result
