"""A problem that peers in processes of their own learn together: a noisy line, least squares."""

from __future__ import annotations

import torch

from tests.support.swarm_vectors import Vectors

ELEMENTS = 256
_SAMPLES, _HELD_OUT = 4000, 2000
"""Where peers have fewer samples than numbers to learn, what they learn differs so much that nobody
can tell a sign flipped from an honest contribution, and the loss doubles."""
_NOISE, _RATE = 0.3, 0.2
_ROUNDS, _LOCAL_STEPS = 20, 8


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

    def loss(self, values: torch.Tensor) -> float:
        """Return the mean squared error of these numbers on samples that nobody learns from."""
        x, y = self._held_out
        return float((x @ values - y).square().mean())


def _drawn(truth: torch.Tensor, samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((samples, ELEMENTS), generator=generator)
    return x, x @ truth + _NOISE * torch.randn(samples, generator=generator)


def learnt_by(peers: int) -> float:
    """Return the loss of the mean of so many peers that all tell the truth, at its best."""
    lines, values = [Line(peer) for peer in range(peers)], torch.zeros(ELEMENTS)
    for _ in range(_ROUNDS):
        each = []
        for line in lines:
            vectors = Vectors((ELEMENTS,))
            vectors.fragments[0].copy_(values)
            for _ in range(_LOCAL_STEPS):
                line.step(vectors)
            each.append(vectors.fragments[0])
        values = torch.stack(each).mean(dim=0)
    return lines[0].loss(values)
