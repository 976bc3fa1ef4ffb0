"""Moves: how far rounds carry a fragment's anchor, and so how far away another one can be.

What others give may be anywhere, at the same loss. Rounds go step by step, and a peer has seen how
large their steps are. What is further away than steps explain is not refused for that, since halves
of a swarm that were cut apart for long are, too; but the trial allows it less (`losses.py`). Only
what all rounds together cannot have moved is refused without a trial.

How many rounds there were is what a stamp claims, and no more than there is time for: since the
last round of its own a peer believes in as many as fit at the shortest time that one took here.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from atomtrain.swarm.anchors.anchors import Anchor
from atomtrain.swarm.anchors.stamps import steady_s

FACTOR = 10.0
"""Times the largest move of a round seen lately that another one may have: others' rounds have
other members, and momentum grows to ten times the first step."""
LEAST_MOVES = 3
"""Of a fragment that a peer must have seen to refuse another anchor untried: whoever has just come
saw newcomers' small steps at first, and those of all others were larger."""
LATELY = 32
"""Moves of a fragment that are remembered, and times between two."""
LEAST_SHARE = 2.0**-6
"""Part of an anchor's size by which any round may have moved it: a peer that slept while the
learning rate rose, or came late, has seen small moves only."""
_SAMPLE = 1 << 16
"""Elements of which a move is measured: the peer's own rounds hide nothing from it."""


class _Round(NamedTuple):
    """The last one of a fragment that this peer was in."""

    version: int
    at_s: float


class Moves:
    """The moves of one peer's anchors; root mean squares."""

    def __init__(self, clock: Callable[[], float] = steady_s) -> None:
        """Know none yet; `clock` is in seconds, and goes on while the machine sleeps."""
        self._clock = clock
        self._seen: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=LATELY))
        self._took_s: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=LATELY))
        self._last: dict[int, _Round] = {}

    def note(self, fragment: int, before: Anchor, after: Anchor) -> None:
        """Hear that rounds of this peer's have made one anchor of another."""
        step, now_s = max(1, before.values.numel() // _SAMPLE), self._clock()
        versions = max(1, after.stamp.version - before.stamp.version)
        self._seen[fragment].append(_apart(before.values[::step], after.values[::step]) / versions)
        if fragment in self._last and now_s > self._last[fragment].at_s:
            self._took_s[fragment].append((now_s - self._last[fragment].at_s) / versions)
        self._last[fragment] = _Round(after.stamp.version, now_s)

    def explain(self, fragment: int, own: Anchor, other: Anchor) -> bool:
        """Say whether rounds between two anchors can have moved one to the other.

        Yes where this peer has seen none.
        """
        versions = 1 + abs(self._believed(fragment, own, other) - own.stamp.version)
        largest = max(self._seen[fragment], default=0.0)
        return not largest or _apart(own.values, other.values) <= FACTOR * largest * versions

    def objection(self, fragment: int, own: Anchor, other: Anchor) -> str:
        """Return why all rounds of both together cannot have moved them so far apart, or "".

        Empty also where this peer has seen too few moves to know.
        """
        if len(self._seen[fragment]) < LEAST_MOVES:
            return ""
        versions = 1 + own.stamp.version + self._believed(fragment, own, other)
        largest = max(*self._seen[fragment], LEAST_SHARE * _size(own.values))
        apart = _apart(own.values, other.values)
        if apart <= FACTOR * largest * versions:
            return ""
        return (
            f"it is {apart:.3g} away from this peer's in the root mean square, further than "
            f"{versions} rounds can have moved them"
        )

    def _believed(self, fragment: int, own: Anchor, other: Anchor) -> int:
        """Return the version that another anchor claims, or the last that there is time for."""
        claimed = other.stamp.version
        if not self._took_s[fragment]:
            return claimed
        last = self._last[fragment]
        rounds = int((self._clock() - last.at_s) / min(self._took_s[fragment]))
        return min(claimed, max(own.stamp.version, last.version + rounds))


def _size(values: torch.Tensor) -> float:
    return _mean(float(values.norm()), values.numel())


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return _mean(float(torch.dist(one, other)), one.numel())


def _mean(norm: float, elements: int) -> float:
    return norm / math.sqrt(max(1, elements))
