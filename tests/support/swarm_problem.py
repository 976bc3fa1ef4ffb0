"""A problem that peers in processes of their own learn together: a noisy line, least squares."""

from __future__ import annotations

from dataclasses import replace

import torch

from atomtrain.swarm import Swarm
from atomtrain.swarm.anchors.anchors import Snapshot
from tests.support.swarm_vectors import Vectors

ELEMENTS = 256
_SAMPLES, _HELD_OUT = 200, 2000
_NOISE, _RATE = 0.3, 0.2


class Line:
    """One peer's samples, and those that nobody learns from; the same line for all."""

    def __init__(self, peer: int) -> None:
        """Draw the samples of peer number `peer`."""
        truth = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(5))
        self._x, self._y = _drawn(truth, _SAMPLES, 100 + peer)
        self._held_out = _drawn(truth, _HELD_OUT, 99)

    def step(self, vectors: Vectors) -> None:
        """Go down the gradient of this peer's mean squared error."""
        [w] = vectors.fragments
        w.sub_(self._x.T @ (self._x @ w - self._y) / _SAMPLES, alpha=_RATE)

    def loss(self, swarm: Swarm) -> float:
        """Return the mean squared error of the anchor on samples that nobody learns from."""
        x, y = self._held_out
        anchor = swarm._service.context.mailbox.store.anchor(0)
        return float((x @ anchor.values - y).square().mean())


def _drawn(truth: torch.Tensor, samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((samples, ELEMENTS), generator=generator)
    return x, x @ truth + _NOISE * torch.randn(samples, generator=generator)


def contribute_otherwise(swarm: Swarm, factor: float) -> None:
    """Have a peer contribute its changes times a factor."""
    store = swarm._service.context.mailbox.store
    take = store.snapshot

    def snapshot(fragment: int, local: torch.Tensor, into: torch.Tensor) -> Snapshot:
        taken = take(fragment, local, into)
        anchor = taken.anchor.values
        return replace(taken, values=anchor + factor * (taken.values - anchor))

    store.snapshot = snapshot  # type: ignore[method-assign]
