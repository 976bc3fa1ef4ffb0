"""Ways from the turn downwards, as the search of `activation_dp.py` finds them: tables of them."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atomtrain.planning.search.dp_state import CLOCKS, undominated

Array = NDArray[np.float64]
Whole = NDArray[np.intp]
Mask = NDArray[np.bool_]

ABOVE, ROOM, AHEAD = CLOCKS, CLOCKS + 1, CLOCKS + 2
"""Columns of `Ways.values` behind the clocks."""


_NOTES = 5
SEGMENTS, WINDOW, CHOICE, BEFORE, LABEL = range(_NOTES)
"""Columns of `Ways.notes`: how many segments there are so far, the turn included, 0 where that does
not matter; whether the window is reserved, so that offloaded segments may follow; what the last
segment does, by its place in `CHOICES`; the cut above it, or that above the last layer if it is the
turn; and which of the ways there it goes on from."""


class Ways(NamedTuple):
    """Ways from the turn down to one cut; `n` of them."""

    values: Array
    """`[n, 9]`: clocks, load of the segment above, room times -1, forward."""
    notes: Whole
    """`[n, 5]`."""

    @classmethod
    def of(
        cls, values: Array, *, segments: Any, window: bool, choice: Any, before: int, label: Any
    ) -> Ways:
        """Return ways with these notes; each is a number, or `[n]`."""
        notes = np.empty((len(values), _NOTES), int)
        for column, note in enumerate((segments, window, choice, before, label)):
            notes[:, column] = note
        return cls(values, notes)

    @property
    def segments(self) -> Whole:
        """So far."""
        return self.notes[:, SEGMENTS]

    @property
    def window(self) -> Mask:
        """Whether it is reserved."""
        window: Mask = self.notes[:, WINDOW] > 0
        return window

    @property
    def before(self) -> Whole:
        """The cut above the last segment."""
        return self.notes[:, BEFORE]

    @property
    def keeping(self) -> Mask:
        """Whether only segments were kept so far, so that the next one may be kept too."""
        keeping: Mask = self.values[:, ROOM] <= 0
        return keeping


Pending = dict[int, list[Ways]]
"""Ways by the cuts that they lead to."""


def add(pending: Pending, cuts: Whole, ways: Ways) -> None:
    """Note where ways lead; `cuts` is `[n]`."""
    if not cuts.size:
        return
    order = np.argsort(cuts, kind="stable")
    cuts, values, notes = cuts[order], ways.values[order], ways.notes[order]
    bounds = [0, *(np.flatnonzero(np.diff(cuts)) + 1).tolist(), cuts.size]
    for start, stop in itertools.pairwise(bounds):
        some = Ways(values[start:stop], notes[start:stop])
        pending.setdefault(int(cuts[start]), []).append(some)


def best_of(parts: list[Ways]) -> Ways:
    """Return the ways to a cut that no other one beats."""
    values = np.concatenate([part.values for part in parts])
    notes = np.concatenate([part.notes for part in parts])
    apart = 2 * notes[:, SEGMENTS] + notes[:, WINDOW]
    kept: list[int] = []
    for one in np.unique(apart):
        rows = np.flatnonzero(apart == one)
        kept += rows[undominated(values[rows])].tolist()
    return Ways(values[kept], notes[kept])
