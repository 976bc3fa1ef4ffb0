"""The owner's part in a round: gather what arrives for one slice, judge it, and close it once.

A contribution counts only if all of it arrived before the slice was closed and the guard lets it
through. The mean is taken over exactly those that count.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from atomtrain.swarm.codecs.codec import square_of
from atomtrain.swarm.membership.guards import Guard


class SliceReduction:
    """Weighted mean of one slice over the members of a group.

    Members are indices in the group. Holds all contributions to the slice until it is closed.
    Thread-safe use is up to the caller: `add` and `close` may run on a worker thread, one call at a
    time.
    """

    def __init__(self, elements: int, weights: Sequence[int], guard: Guard | None = None) -> None:
        """Expect a contribution from each member with a weight above zero."""
        self._elements = elements
        self._weights = tuple(weights)
        self._guard = guard or Guard()
        self._awaited = {member for member, weight in enumerate(weights) if weight > 0}
        self._values: dict[int, torch.Tensor] = {}
        self._norms: dict[int, float] = {}
        self._closed = False
        self.rejected: dict[int, str] = {}
        """Members whose contribution was evidence against them, and why."""

    @property
    def complete(self) -> bool:
        """Nobody is awaited any more."""
        return not self._awaited

    @property
    def awaited(self) -> frozenset[int]:
        """Members whose contribution may still come."""
        return frozenset(self._awaited)

    def add(self, member: int, values: torch.Tensor) -> bool:
        """Take a complete contribution, 1-D float32 of the slice's size; say whether it may count.

        It may not if it is not finite, not awaited (any more), or too late. A contribution that
        does not count makes its member lost. `values` are the reduction's from now on.
        """
        if self._closed or member not in self._awaited:
            return False
        self._awaited.discard(member)
        if values.shape != (self._elements,):
            return False
        square = square_of(values)
        if square is None:
            self.rejected[member] = "not finite"
            return False
        self._values[member] = values
        self._norms[member] = square**0.5
        return True

    def lose(self, member: int) -> None:
        """Stop waiting for a member."""
        self._awaited.discard(member)

    def reject(self, member: int, reason: str) -> None:
        """Stop waiting for a member that sent what cannot be honest."""
        self._awaited.discard(member)
        self.rejected.setdefault(member, reason)

    def close(self, out: torch.Tensor | None = None) -> tuple[tuple[int, ...], torch.Tensor | None]:
        """Return who counts, ascending, and their mean; None if nobody does. Closes for good.

        The mean is written to `out` if there is one, else perhaps to a contribution's memory.
        """
        self._closed = True
        self._awaited.clear()
        values, self._values = self._values, {}
        norms, self._norms = self._norms, {}
        for member, reason in self._guard.too_large(norms, self._elements, self._weights).items():
            del values[member]
            self.rejected[member] = reason
        if not values:
            return (), None
        return tuple(sorted(values)), self._guard.mean_of(values, self._weights, out)
