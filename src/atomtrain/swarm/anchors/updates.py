"""Updates: what a round's mean does to the anchor, of changes or of gradients.

Each operation rounds once per element, so that every machine computes the same bits: no fused
multiply-add, whose use depends on the processor, and no reduction, whose order does.

Where gradients are averaged all peers step together, with the optimizer's moments in the place of
the outer update's velocity. So they are versioned, hashed, fetched and saved with the anchor, and
the parameters of all members are equal bit for bit after each step: an anchor's version is the
number of steps that made it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from atomtrain.settings import one_of

if TYPE_CHECKING:
    import torch

    from atomtrain.swarm.codecs.slices import Span

OUTERS = ("nesterov", "mean")
"""Names of outer updates, the default first."""
check_outer_name = one_of(OUTERS, "outer update")
"""Refuses a name that is not among them."""
OVERLAP_WEIGHTS = {"nesterov": 0.5, "mean": 1.0}
"""By name: share of what is learnt during a round that its merge leaves in the parameters."""
DROPPED = -0.0
"""Velocity of an element whose momentum was dropped: its next step is a plain one.

Nesterov's update looks ahead also from a velocity of zero, and so would carry a mean beyond what
its contributors want, which is why momentum is dropped at all.
"""
_DROPPED_BITS = -(1 << 31)
LONG_STEPS = 100
"""Local steps from which on a round's change is a smooth enough gradient for full momentum."""


class Place(NamedTuple):
    """Which elements an update is applied to."""

    fragment: int
    start: int
    """First element in the fragment."""
    version: int
    """Of the anchor that is updated."""


class Update(Protocol):
    """What a round applies to an anchor."""

    @property
    def rows(self) -> int:
        """How many numbers each element has besides its value, such as a velocity."""
        ...

    def admits(self, velocity: torch.Tensor) -> bool:
        """Say whether finite numbers, 1-D, can be the velocity of an anchor."""
        ...

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
        """Write the new anchor to `out`, and change `velocity` in place.

        All are 1-D float32 of one length, but for `velocity`, which has as many rows as `rows`
        says, and is 1-D with a single one. `out` may be `mean`. The same bits on every machine.
        """
        ...


_ANYWHERE = Place(0, 0, 0)


@dataclass(frozen=True, kw_only=True)
class OuterUpdate:
    """Nesterov momentum on anchors, with the mean change as the negative gradient.

    With the defaults it is plain averaging: the new anchor is the old one plus the mean change.

    *Late* contributions, learnt in part before an anchor that was made without them, act at once
    but neither feed nor release momentum (after delayed Nesterov, Liu et al. 2024, arXiv
    2401.09135, algorithm 4): with the share `q` of on-time tokens in the mean `m`,
    `v := (1 - q (1 - momentum)) v + q m`, `anchor += rate (m + q momentum v)`. With `q = 1` this is
    Nesterov's update as `torch.optim.SGD` computes it, with `q = 0` a plain step. Where the
    velocity is `DROPPED` the step is plain, too, and the velocity zero after it.
    """

    learning_rate: float = 1.0
    """Factor on the change; above 0, at most 2."""
    momentum: float = 0.0
    """Share of the last change that is kept; at least 0, below 1. 0 needs no velocity."""

    @property
    def rows(self) -> int:
        """One with momentum: the velocity."""
        return int(self.momentum > 0)

    def admits(self, velocity: torch.Tensor) -> bool:
        """Say yes: a velocity can be anything."""
        return True

    @property
    def gain(self) -> float:
        """How far a change moves the anchor in the long run, relative to the change."""
        return self.learning_rate / (1.0 - self.momentum)

    def apply(
        self,
        anchor: torch.Tensor,
        mean: torch.Tensor,
        velocity: torch.Tensor | None,
        on_time_share: float = 1.0,
        out: torch.Tensor | None = None,
        *,
        place: Place = _ANYWHERE,
    ) -> None:
        """Write the new anchor to `out` (default: `anchor`), and change `velocity` in place.

        All are 1-D float32 of one length, `velocity` needed when there is momentum; `mean` is the
        weighted mean of local minus anchor, and `on_time_share` the part of its weight, 0 to 1,
        that is not late. `out` may be `mean`.
        """
        import torch

        change = mean
        if self.momentum:
            assert velocity is not None, "momentum needs a velocity"
            share, momentum = on_time_share, self.momentum
            dropped = velocity.view(torch.int32) == _DROPPED_BITS
            fed = mean if share == 1.0 else mean.mul(share)
            velocity.mul_(momentum if share == 1.0 else 1.0 - share * (1.0 - momentum)).add_(fed)
            change = velocity.mul(momentum * share).add_(mean)
            if dropped.any():
                velocity.masked_fill_(dropped, 0.0)
                change = torch.where(dropped, mean, change)
        if self.learning_rate != 1.0:
            change = change.mul(self.learning_rate)
        torch.add(anchor, change, out=anchor if out is None else out)


def outer_named(name: str, local_steps: int, fragments: int) -> OuterUpdate:
    """Return the outer update called `name`, fit for rounds of a fragment every `local_steps`.

    `local_steps` 0 stands for a number that is measured. The table and where it comes from are in
    docs/swarm.md.

    Raises:
        ConfigError: there is no such outer update.
    """
    check_outer_name("", name)
    if name == "mean":
        return OuterUpdate()
    if local_steps < LONG_STEPS:
        return OuterUpdate(learning_rate=0.5, momentum=0.5)
    return OuterUpdate(learning_rate=0.7 if fragments == 1 else 0.4, momentum=0.9)


def rows_of(velocity: torch.Tensor | None, rows: int, span: Span) -> torch.Tensor | None:
    """Return the part of a fragment's velocity that belongs to a span, as `Update.apply` has it."""
    if velocity is None:
        return None
    part = velocity.view(rows, -1)[:, span.start : span.stop]
    return part[0] if rows == 1 else part


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
        import numpy as np  # options are declared here, and tell mistakes before anything heavy

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
        # PyTorch's roots, which are MKL's, have other bits on other processors; NumPy's have not.
        roots = second.clone()
        np.sqrt(roots.numpy(), out=roots.numpy())
        size = roots.div_(root).add_(self.eps)
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
