"""Ways from the turn downwards, as the search of `planning/mixed.py` finds them: tables of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atomtrain.planning.clocks import CLOCKS, undominated

Array = NDArray[np.float64]
Whole = NDArray[np.intp]
Mask = NDArray[np.bool_]

ABOVE, ROOM, AHEAD = CLOCKS, CLOCKS + 1, CLOCKS + 2
"""Columns of `Ways.values` behind the clocks."""


class Ways(NamedTuple):
    """Ways from the turn down to one cut; `n` of them."""

    values: Array
    """`[n, 9]`: clocks, load of the segment above, room times -1, forward."""
    segments: Whole
    """So far, the turn included; 0 where their number does not matter."""
    window: Mask
    """The window is reserved: offloaded segments may follow."""
    choice: Whole
    """What the last segment does, by its place in `CHOICES`."""
    before: Whole
    """The cut above the last segment; that above the last layer if it is the turn."""
    label: Whole
    """Which of the ways there it goes on from."""

    @property
    def keeping(self) -> Mask:
        """Whether only segments were kept so far, so that the next one may be kept too."""
        keeping: Mask = self.values[:, ROOM] <= 0
        return keeping

    def some(self, rows: Whole) -> Ways:
        """Return some of them."""
        return Ways._make(column[rows] for column in self)


Pending = dict[int, list[Ways]]
"""Ways by the cuts that they lead to."""


def add(pending: Pending, cuts: Whole, ways: Ways) -> None:
    """Note where ways lead; `cuts` is `[n]`."""
    if not cuts.size:
        return
    order = np.argsort(cuts, kind="stable")
    different, first = np.unique(cuts[order], return_index=True)
    for cut, rows in zip(different.tolist(), np.split(order, first[1:]), strict=True):
        pending.setdefault(cut, []).append(ways.some(rows))


def best_of(parts: list[Ways]) -> Ways:
    """Return the ways to a cut that no other one beats."""
    ways = Ways._make(np.concatenate(columns) for columns in zip(*parts, strict=True))
    apart = 2 * ways.segments + ways.window
    kept = []
    for one in np.unique(apart):
        rows = np.flatnonzero(apart == one)
        kept.append(rows[undominated(ways.values[rows])])
    return ways.some(np.concatenate(kept))
