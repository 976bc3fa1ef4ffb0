"""The owner's part in a round: reduce what arrives for one slice into scratch, and close it once.

A contribution counts only if all of it arrived before the slice was closed; until then it lies in
a buffer of its own. The mean is taken over exactly those that count.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from atomtrain.swarm.codec import all_finite


class SliceReduction:
    """Weighted mean of one slice over the members of a group.

    Members are indices in the group. Thread-safe use is up to the caller: `add` may run on a worker
    thread, one call at a time.
    """

    def __init__(self, elements: int, weights: Sequence[int]) -> None:
        """Expect a contribution from each member with a weight above zero."""
        self._weights = tuple(weights)
        self._sum = torch.zeros(elements, dtype=torch.float32)
        self._awaited = {member for member, weight in enumerate(weights) if weight > 0}
        self._counted: list[int] = []
        self._closed = False

    @property
    def complete(self) -> bool:
        """Nobody is awaited any more."""
        return not self._awaited

    @property
    def awaited(self) -> frozenset[int]:
        """Members whose contribution may still come."""
        return frozenset(self._awaited)

    def add(self, member: int, values: torch.Tensor) -> bool:
        """Count a complete contribution, 1-D float32 of the slice's size; say whether it counts.

        It does not if it is not finite, not awaited (any more), or too late. A contribution that
        does not count makes its member lost.
        """
        if self._closed or member not in self._awaited:
            return False
        self._awaited.discard(member)
        if values.shape != self._sum.shape or not all_finite(values):
            return False
        self._sum.add_(values, alpha=float(self._weights[member]))
        self._counted.append(member)
        return True

    def lose(self, member: int) -> None:
        """Stop waiting for a member."""
        self._awaited.discard(member)

    def close(self) -> tuple[tuple[int, ...], torch.Tensor | None]:
        """Return who counts, ascending, and their mean; None if nobody does. Closes for good."""
        self._closed = True
        self._awaited.clear()
        total = sum(self._weights[member] for member in self._counted)
        if total == 0:
            return (), None
        return tuple(sorted(self._counted)), self._sum.div_(float(total))
