"""Ways from the turn downwards, as the search of `activation_dp.py` finds them, and which to drop.

A way is dropped that is no better in anything than another, or whose step ends too late even if
all goes well (`Rest`). A clock that cannot decide when the step ends is set to the latest time at
which it does not: ways that differ in nothing that matters become equal, and one of them is kept.
"""

from __future__ import annotations

import itertools
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atomtrain.planning.cost.costing import Costing
from atomtrain.planning.cost.tables import VisitTable
from atomtrain.planning.cost.timeline import DiskWork
from atomtrain.planning.plan.shape import Activation, Phase
from atomtrain.planning.search.dp_state import (
    CLOCKS,
    COMPUTE,
    FIRST,
    LOAD,
    UNLOAD,
    UPDATE,
    Clocks,
    Lasting,
    undominated,
)
from atomtrain.planning.search.memory_limit import CHOICES, OFFLOAD
from atomtrain.planning.search.space import Family

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
    """`[n, 9]`: clocks, load of the segment above, budget times -1, forward."""
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
        return self.notes[:, SEGMENTS]

    @property
    def window(self) -> Mask:
        window: Mask = self.notes[:, WINDOW] > 0
        return window

    @property
    def before(self) -> Whole:
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
    values = np.concatenate([part.values for part in parts])
    notes = np.concatenate([part.notes for part in parts])
    apart = 2 * notes[:, SEGMENTS] + notes[:, WINDOW]
    if (apart == apart[0]).all():  # mostly
        alike = undominated(values)
        return Ways(values[alike], notes[alike])
    kept: list[int] = []
    for one in np.unique(apart):
        rows = np.flatnonzero(apart == one)
        kept += rows[undominated(values[rows])].tolist()
    return Ways(values[kept], notes[kept])


class Rest:
    """The rest of forward and backward below each cut, where both have the same partition."""

    def __init__(
        self,
        ahead: VisitTable,
        back: VisitTable,
        ahead_s: Array,
        back_s: Array,
        family: Family,
        disk: DiskWork | None,
    ) -> None:
        """`ahead` and `back` have the seconds of visits, `ahead_s` and `back_s` those of compute
        below each cut, `[cut]`: of forward, and of recomputing and backward."""
        self._overlap, self._single = family.slots > 1, family.gradient_buffers == 1
        self._working_s = 0.0 if disk is None else disk.working_s
        self.forward_s = np.maximum(ahead_s + ahead.loading_s[0, 1], ahead.loading_s[0])
        """The rest of forward with its first load. A range loaded at once takes no longer than in
        parts."""
        # What is kept or offloaded is not computed again.
        again_s = back_s - ahead_s
        last_s = back.unload_s[0, 1] + back.update_s[0, 1]
        self._compute_s = np.maximum(again_s, 0.0) + last_s
        self._update_s = back.update_s[0]
        self._unload_s = back.unload_s[0] + back.update_s[0, 1]
        self._load_s = back.loading_s[0] + last_s
        self._unload_s[0], self._load_s[0] = 0.0, -np.inf
        highest = np.maximum.accumulate(again_s)
        self._next_s = np.concatenate(([0.0], np.maximum(again_s[1:] - highest[:-1], 0.0)))
        """Of any backward visit whose segment ends at the cut."""
        self._next_forward_s = np.concatenate(([0.0], np.diff(ahead_s)))

    def ends_s(
        self, clocks: Array, cuts: Whole, again_s: Any = 0.0, *, below_turn: bool = False
    ) -> Array:
        """Return times before which steps cannot end, but for the forward visits so far.

        Args:
            clocks: `[..., 6]`, at the cuts.
            cuts: Broadcasts against the clocks.
            again_s: What has to be computed again below them.
            below_turn: The turn is just above: with two slots the segment below it, which may be
                all that is left, still is in its slot.
        """
        ends = clocks[..., COMPUTE] + self._compute_s[cuts] + again_s
        busy = [(UPDATE, self._update_s), (UNLOAD, self._unload_s)]
        if not (below_turn and self._overlap):
            busy.append((LOAD, self._load_s))
        for clock, rest in busy:
            ends = np.maximum(ends, clocks[..., clock] + rest[cuts])
        ends = np.maximum(ends, clocks[..., FIRST] + self._working_s)
        ends_s: Array = ends + self.forward_s[cuts]
        return ends_s

    def settle(self, clocks: Array, cuts: Whole, most_load_s: Array) -> None:
        """Put clocks that do not matter as late as they may be; `most_load_s` is the longest load
        of a segment that ends at each cut."""
        compute = clocks[..., COMPUTE]
        late = {UPDATE: self._compute_s[cuts] - self._update_s[cuts]}
        if not self._single:
            late[UNLOAD] = self._next_s[cuts]
        if self._overlap:
            late[LOAD] = -most_load_s[cuts]
        for clock, margin in late.items():
            clocks[..., clock] = np.maximum(clocks[..., clock], compute + margin)

    def settled_load_s(self, load_s: Array, cuts: Whole) -> Array:
        if not self._overlap:
            return load_s
        settled: Array = np.maximum(load_s, self._next_forward_s[cuts])
        return settled


class Visits:
    """Seconds of visits below the turn, and how they move the clocks of ways."""

    def __init__(self, costing: Costing, family: Family) -> None:
        """Tables are made when they are first needed: most families are never searched."""
        self._costing, self._place = costing, family.place
        self._overlap = family.slots > 1

    def forward(self, activation: Activation = "recompute") -> VisitTable:
        """Return the seconds of forward's visits."""
        return self._table(Phase.FORWARD, activation)

    def backward(self, activation: Activation = "recompute", *, load: bool = True) -> VisitTable:
        """Return the seconds of backward's; without `load` the segment is still in its slot."""
        return self._table(Phase.BACKWARD, activation, load=load)

    def most_forward_s(self) -> Array:
        """Return the seconds of forward's visits, whatever they do with what they save."""
        most: Array = self._ahead_s.max(axis=0)
        return most

    def after(
        self,
        clocks: Clocks,
        values: Array,
        cut: int,
        starts: Whole,
        choices: Whole,
        below_turn: Mask,
    ) -> tuple[Array, Array]:
        """Return the clocks after both visits as if forward's took no time, `[n, 6]`, and what
        they come later for it, `[n]`.

        Args:
            clocks: How visits move them.
            values: Of ways to a cut, as in `Ways`, `[n, 9]`.
            cut: Where the segments end.
            starts: Where each way's next segment begins, `[n]`.
            choices: What that segment does, by its place in `CHOICES`, `[n]`.
            below_turn: Whether it is the first one below the turn, `[n]`.
        """
        ahead_s, above_s = self._ahead_s[choices, starts, cut], values[:, ABOVE]
        later_s = np.maximum(ahead_s, above_s) if self._overlap else ahead_s + above_s
        back, return_s = self._backward, self._return_s[starts, cut]
        lasting = Lasting(
            visit_s=self._back_s[1, choices, starts, cut],
            loading_s=back.loading_s[starts, cut],
            unload_s=back.unload_s[starts, cut],
            update_s=back.update_s[starts, cut],
            return_s=np.where(choices == OFFLOAD, return_s, 0.0),
        )
        if self._overlap and below_turn.any():
            # The last segment below the turn still is in its slot if there are two.
            hit_s = self._back_s[0, choices, starts, cut]
            lasting = lasting._replace(
                visit_s=np.where(below_turn, hit_s, lasting.visit_s),
                loading_s=np.where(below_turn, 0.0, lasting.loading_s),
            )
        return clocks.after_visit(values[:, :CLOCKS], lasting), later_s

    def _table(self, phase: Phase, activation: Activation, *, load: bool = True) -> VisitTable:
        return self._costing.table(phase, self._place, load=load, activation=activation)

    @cached_property
    def _backward(self) -> VisitTable:
        return self.backward()

    @cached_property
    def _return_s(self) -> Array:
        return self.backward("offload").return_s

    @cached_property
    def _ahead_s(self) -> Array:
        """Seconds of forward's visits, `[choice, start, stop]`."""
        return np.stack([self.forward(choice).visit_s for choice in CHOICES])

    @cached_property
    def _back_s(self) -> Array:
        """The same of backward's, `[load, choice, start, stop]`."""
        return np.stack(
            [[self.backward(c, load=load).visit_s for c in CHOICES] for load in (False, True)]
        )
