"""Moves: how far rounds carry a fragment's anchor, and so how far away another one can be.

What others give may be anywhere, at the same loss. Rounds go step by step, and a peer has seen how
large their steps are. What is further away than steps explain is not refused for that, since halves
of a swarm that were cut apart for long are, too; but the trial allows it less (`losses.py`). Only
what all rounds together cannot have moved is refused without a trial.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque

import torch

from atomtrain.swarm.anchors.anchors import Anchor

FACTOR = 10.0
"""Times the largest move of a round seen lately that another one may have: others' rounds have
other members, and momentum grows to ten times the first step."""
LATELY = 32
"""Moves of a fragment that are remembered."""
LEAST_SHARE = 2.0**-6
"""Part of an anchor's size by which any round may have moved it: a peer that slept while the
learning rate rose, or came late, has seen small moves only."""
_SAMPLE = 1 << 16
"""Elements of which a move is measured: the peer's own rounds hide nothing from it."""


class Moves:
    """The moves of one peer's anchors; root mean squares."""

    def __init__(self) -> None:
        """Know none yet."""
        self._seen: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=LATELY))

    def note(self, fragment: int, before: Anchor, after: Anchor) -> None:
        """Hear that rounds of this peer's have made one anchor of another."""
        step = max(1, before.values.numel() // _SAMPLE)
        versions = max(1, after.stamp.version - before.stamp.version)
        self._seen[fragment].append(_apart(before.values[::step], after.values[::step]) / versions)

    def explain(self, fragment: int, own: Anchor, other: Anchor) -> bool:
        """Say whether rounds between two anchors can have moved one to the other.

        Yes where this peer has seen none.
        """
        versions = 1 + abs(other.stamp.version - own.stamp.version)
        largest = max(self._seen[fragment], default=0.0)
        return not largest or _apart(own.values, other.values) <= FACTOR * largest * versions

    def objection(self, fragment: int, own: Anchor, other: Anchor) -> str:
        """Return why all rounds of both together cannot have moved them so far apart, or ""."""
        if not self._seen[fragment]:
            return ""
        versions = 1 + own.stamp.version + other.stamp.version
        largest = max(*self._seen[fragment], LEAST_SHARE * _size(own.values))
        apart = _apart(own.values, other.values)
        if apart <= FACTOR * largest * versions:
            return ""
        return (
            f"it is {apart:.3g} away from this peer's in the root mean square, further than "
            f"{versions} rounds can have moved them"
        )


def _size(values: torch.Tensor) -> float:
    return _mean(float(values.norm()), values.numel())


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return _mean(float(torch.dist(one, other)), one.numel())


def _mean(norm: float, elements: int) -> float:
    return norm / math.sqrt(max(1, elements))
