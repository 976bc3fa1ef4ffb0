"""How much each micro-batch of a step counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from torch import Tensor

from atomtrain.errors import ConfigError

T = TypeVar("T")


class Weighted(NamedTuple):
    """The micro-batches that count, and what their losses are multiplied by."""

    indices: Sequence[int]
    """Of those that count, in order."""
    weights: Sequence[float] | None
    """One for each, which add up to 1; `None`: losses are divided by their number."""

    def of(self, items: Sequence[T]) -> list[T]:
        """Return the items of those that count."""
        return [items[index] for index in self.indices]

    def mean(self, losses: Sequence[Tensor]) -> float:
        """Return the mean of the losses of those that count."""
        if self.weights is None:
            return sum(float(loss) for loss in losses) / len(losses)
        pairs = zip(losses, self.weights, strict=True)
        return sum(float(loss) * weight for loss, weight in pairs)


def weighted(count: int, weights: Sequence[float] | None) -> Weighted:
    """Return how much each of so many micro-batches counts.

    Args:
        count: How many there are.
        weights: One for each, in any unit, such as their targets; `None`: all count alike.

    Raises:
        ConfigError: there are more or fewer, or they are no weights.
    """
    if weights is None:
        return Weighted(range(count), None)
    given = [float(weight) for weight in weights]
    total = sum(given)
    if len(given) != count or min(given) < 0 or not 0 < total < math.inf:
        raise ConfigError(
            f"weights must be {count} numbers from 0 on, one for each micro-batch and not all of "
            f"them 0, not {given!s:.80}"
        )
    kept = [index for index, weight in enumerate(given) if weight]
    if len({given[index] for index in kept}) == 1:
        return Weighted(kept, None)
    return Weighted(kept, [given[index] / total for index in kept])
