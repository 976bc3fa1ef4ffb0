"""What is left of a step at a cut, at least: bounds that end a search early, and clocks that do not
matter.

A clock that cannot decide when the step ends is set to the latest time at which it does not. So
ways that differ in nothing that matters become equal, and all but one of them can be forgotten.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from atomtrain.planning.cost.tables import VisitTable
from atomtrain.planning.cost.timeline import DiskWork
from atomtrain.planning.search.dp_state import COMPUTE, FIRST, LOAD, UNLOAD, UPDATE

Array = NDArray[np.float64]
Cuts = NDArray[np.intp]


class Rest:
    """The rest of forward and backward below each cut, where both have the same partition."""

    def __init__(
        self,
        ahead: VisitTable,
        back: VisitTable,
        ahead_s: Array,
        back_s: Array,
        disk: DiskWork | None,
        *,
        overlap: bool,
        single: bool,
    ) -> None:
        """Make the bounds of a family.

        Args:
            ahead: Seconds of forward visits.
            back: Seconds of backward visits.
            ahead_s: Compute of forward below each cut, `[cut]`.
            back_s: The same of recomputing and backward.
            disk: What updates take where state is on disk.
            overlap: There are two slots.
            single: There is one gradient buffer.
        """
        self._overlap, self._single = overlap, single
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
        self, clocks: Array, cuts: Cuts, again_s: Any = 0.0, *, below_turn: bool = False
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

    def settle(self, clocks: Array, cuts: Cuts, most_load_s: Array) -> None:
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

    def settled_load_s(self, load_s: Array, cuts: Cuts) -> Array:
        """Return the loads of the segments above, none shorter than what covers it anyway."""
        if not self._overlap:
            return load_s
        settled: Array = np.maximum(load_s, self._next_forward_s[cuts])
        return settled
