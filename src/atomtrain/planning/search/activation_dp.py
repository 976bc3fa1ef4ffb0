"""The fastest plan that keeps or offloads what forward saves: exact, by dynamic programming.

Forward and backward have one partition here, and each segment below the turn its own choice. From
the turn downwards: some segments are kept, then any are recomputed or offloaded. A way to a cut is
described by

- the clocks of `dp_state.py`, to which the forward visits passed so far are added, because
  the turn begins that much later and all clocks with it (they are kept apart where the turn may
  have to wait for updates of the step before, and only as far as it is not decided yet whether it
  has to);
- the load of the segment above: the forward visit below covers it;
- the budget: how many bytes may be kept below, so that no visit above has too little memory. As
  kept segments are next to the turn, it matters only while segments are kept; then it is -1.

A later clock, a longer load and a smaller budget never make a plan better, so of two ways to a cut
the one that is worse (or equal) in all of them can be forgotten; a way that still may keep can do
all that one can that may not. The window of transfers is reserved from below the turn to the lowest
offloaded segment: ways with and without a window are apart.

All ways to a cut are extended at once by all segments that end there, whatever these do.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from atomtrain.planning.plan.shape import Activation, Phase, Shape
from atomtrain.planning.search.dp_state import SLACK, Clocks
from atomtrain.planning.search.memory_limit import (
    CHOICES,
    KEEP,
    OFFLOAD,
    RECOMPUTE,
    ActivationBudget,
    ActivationBudgets,
    Saving,
)
from atomtrain.planning.search.pareto_front import (
    ABOVE,
    AHEAD,
    BEFORE,
    CHOICE,
    LABEL,
    ROOM,
    Pending,
    Rest,
    Visits,
    Ways,
    Whole,
    add,
    best_of,
)
from atomtrain.planning.search.partition_dp import Found
from atomtrain.planning.search.space import Family, Space

Array = NDArray[np.float64]

_LESS = -1.0  # a larger budget is better: its negative is compared


class ActivationDP:
    def __init__(self, space: Space, family: Family, *, offload: bool = True) -> None:
        """`offload`: whether segments may be offloaded."""
        self._family = family
        self._segments, self._layers = space.request.segments, space.layers
        self._overlap = family.slots > 1
        self.budgets = ActivationBudgets(space, family, offload=offload)
        """What may be kept under which limit of memory."""
        self._kept, self._window_bytes = self.budgets.kept, self.budgets.window_bytes
        self._turn = space.costing.table(Phase.TURN, family.place, load=True)
        self._visits = Visits(space.costing, family)
        self._disk = space.costing.disk_work(family.place.on_device)
        self._backlog_s = 0.0 if self._disk is None else self._disk.backlog_s
        self._clocks = Clocks(family, self._disk)
        ahead, back = space.costing.layer_forward_s, space.costing.layer_backward_s
        self._ahead_s = np.concatenate(([0.0], np.cumsum(ahead)))
        self._back_s = np.concatenate(([0.0], np.cumsum(back)))
        # The least time of both visits to all layers below a cut.
        self._least_s = np.maximum(self._ahead_s, self._back_s)
        self._recomputed_s = self._ahead_s + self._back_s - self._least_s
        # Before the first visit there is its load, after the last one its unload and update.
        first, last = self._visits.forward(), self._visits.backward()
        self._ends_s = float(first.loading_s[0, 1] + last.unload_s[0, 1] + last.update_s[0, 1])
        self._most_load_s = np.zeros(self._layers + 1)
        self._saving = Saving(space, self.budgets.offloads)

    def bound_s(self, budget: ActivationBudget) -> float:
        starts = np.flatnonzero(budget.turn >= 0)
        if not starts.size:
            return np.inf
        # A range loaded at once takes no longer than in parts.
        loads = self._turn.loading_s[starts, self._layers]
        loads = loads + self._visits.forward().loading_s[0, starts]
        ahead = self._ahead_s[starts]
        back = self._least_s[starts] - ahead + self._back_s[-1] - self._back_s[starts]
        again, most = self._saving.possible_s(self._recomputed_s, budget, self.budgets)
        compute = self._saving.least_s(ahead, back, again[starts], most[starts])
        alone = np.zeros_like(loads)
        if not self._overlap:
            alone = loads + self._visits.backward().loading_s[0, starts]
        if self._overlap:
            alone = alone + self._ends_s
        return float(np.maximum(compute + alone, loads).min())

    def best(self, budget: ActivationBudget, below_s: float) -> Found | None:
        """Return the fastest plan of this budget, or `None` if none is faster than `below_s`."""
        fits = (budget.segments >= 0).any(axis=0)
        loads = np.where(fits, self._visits.backward().loading_s, 0.0)
        self._most_load_s = loads.max(axis=0)
        self._clocks = Clocks(self._family, self._disk, float(loads.max()))
        pending: Pending = {}
        self._begin(budget, below_s, pending)
        done: dict[int, Ways] = {}
        for cut in range(self._layers - 1, -1, -1):
            if cut in pending:
                here = done[cut] = best_of(pending.pop(cut))
                if cut:
                    self._extend(cut, here, budget, below_s, pending)
        if 0 not in done:
            return None
        here = done[0]
        turns_s = np.maximum(here.values[:, AHEAD] + here.values[:, ABOVE], self._backlog_s)
        steps_s = turns_s + self._clocks.ends(here.values, turns_s)
        steps_s = np.where(here.segments == (self._segments or 0), steps_s, np.inf)
        label = int(np.argmin(steps_s))
        if steps_s[label] >= below_s:
            return None
        return Found(float(steps_s[label]), self._shape(done, label))

    def _begin(self, budget: ActivationBudget, below_s: float, pending: Pending) -> None:
        starts = np.flatnonzero(budget.turn >= 0)
        clocks = self._clocks.after_turn(self._turn, starts, self._layers, np.zeros(starts.size))
        self._rest.settle(clocks, starts, self._most_load_s)
        ends_s = self._rest.ends_s(clocks, starts, below_turn=True)
        ends_s = ends_s + self._begun_s(np.zeros(starts.size), starts)
        left = budget.turn[starts]
        rows = np.flatnonzero(ends_s <= below_s * SLACK)
        for window in (False, True)[: 1 + self.budgets.offloads]:  # it is for the visits below
            values = np.column_stack(
                (
                    clocks[rows],
                    self._above_s(self._turn.loading_s[:, self._layers], starts[rows]),
                    self._less_budget(left[rows], starts[rows]),
                    np.zeros(rows.size),
                )
            )
            ways = Ways.of(
                values,
                segments=self._segments is not None,
                window=window,
                choice=RECOMPUTE,
                before=self._layers,
                label=-1,
            )
            add(pending, starts[rows], ways)

    def _extend(
        self, cut: int, here: Ways, budget: ActivationBudget, below_s: float, pending: Pending
    ) -> None:
        able = np.ones(here.segments.size, bool)
        if self._segments is not None:
            able = here.segments < self._segments
        reserved = np.where(here.window, self._window_bytes, 0)[:, None]
        left = budget.segments[:, :cut, cut]
        choices, starts = np.nonzero(left >= reserved.min())
        left = left[choices, starts]
        allowed = able[:, None] & (left >= reserved)
        allowed &= here.window[:, None] | (choices != OFFLOAD)
        allowed &= here.keeping[:, None] | (choices != KEEP)
        budgets = np.zeros(allowed.shape)
        keeps = np.flatnonzero(choices == KEEP)
        before = _LESS * here.values[:, ROOM, None] - self._kept[starts[keeps], cut]
        budgets[:, keeps] = np.minimum(before, left[keeps] - reserved)
        rows, columns = np.nonzero(allowed & (budgets >= 0))
        if not rows.size:
            return
        cuts, choice, room_left = starts[columns], choices[columns], budgets[rows, columns]
        values, below_turn = here.values[rows], here.before[rows] == self._layers
        after, later_s = self._visits.after(self._clocks, values, cut, cuts, choice, below_turn)
        forward_s = values[:, AHEAD]
        above_s = self._above_s(self._visits.forward().loading_s[:, cut], cuts)
        if self._backlog_s:  # kept apart, because the turn may have to wait
            forward_s = self._settle_forward(after, forward_s + later_s, above_s, cuts)
        else:
            after += later_s[:, None]
        self._rest.settle(after, cuts, self._most_load_s)
        begun_s = self._begun_s(forward_s, cuts)
        hopeful = self._rest.ends_s(after, cuts) + begun_s <= below_s * SLACK
        if not hopeful.any():
            return
        kept = choice == KEEP
        again_s = self._recomputed_s[cuts]
        again_s[kept] = self._saving.again_s(again_s[kept], room_left[kept])
        alone = self._rest.ends_s(after, cuts, again_s) + begun_s <= below_s * SLACK
        reserved_above = here.window[rows]
        room_left = np.where(kept, room_left, -1.0)
        # What is offloaded last gives the window back.
        for window, chosen in (
            (True, hopeful & reserved_above),
            (False, hopeful & alone & (~reserved_above | (choice == OFFLOAD))),
        ):
            some = np.flatnonzero(chosen)
            if not some.size:
                continue
            values = np.column_stack(
                (
                    after[some],
                    above_s[some],
                    self._less_budget(room_left[some], cuts[some]),
                    forward_s[some],
                )
            )
            ways = Ways.of(
                values,
                segments=here.segments[rows[some]] + (self._segments is not None),
                window=window,
                choice=choice[some],
                before=cut,
                label=rows[some],
            )
            add(pending, cuts[some], ways)

    def _begun_s(self, forward_s: Array, cuts: Whole) -> Array:
        """Return how long before the turn, at least, the step began, but for the rest of forward
        below some cuts; `forward_s`: what is passed of it."""
        if not self._backlog_s:
            return forward_s
        begun_s: Array = np.maximum(forward_s, self._backlog_s - self._rest.forward_s[cuts])
        return begun_s

    def _settle_forward(
        self, clocks: Array, forward_s: Array, above_s: Array, cuts: Whole
    ) -> Array:
        """Return the seconds of forward so far, as far as they can decide whether the turn waits.

        What is above that comes later for certain, and is added to the clocks; below it the turn
        waits for certain, and it does not matter how long forward took.
        """
        enough_s = self._backlog_s - self._rest.forward_s[cuts]
        clocks += np.maximum(forward_s - enough_s, 0.0)[:, None]
        hidden_s = self._backlog_s - self._most_forward_s[cuts] - above_s
        settled: Array = np.maximum(np.minimum(forward_s, enough_s), hidden_s)
        return settled

    @cached_property
    def _most_forward_s(self) -> Array:
        """No rest of forward below a cut takes longer, whatever its segments are and do."""
        most_s = np.zeros(self._layers + 1)
        visits_s = self._visits.most_forward_s() + self._visits.forward().loading_s
        visits_s = np.where(np.isfinite(visits_s), visits_s, -np.inf)
        for cut in range(1, self._layers + 1):
            most_s[cut] = (visits_s[:cut, cut] + most_s[:cut]).max()
        return most_s

    def _above_s(self, load_s: Array, cuts: Whole) -> Array:
        return self._rest.settled_load_s(load_s[cuts], cuts)

    def _less_budget(self, budget: Array, cuts: Whole) -> Array:
        """Return budgets at some cuts times -1: none larger than what is below can use, 1 where it
        is too small for any segment that ends there."""
        budget = np.minimum(budget, self._most_kept[cuts])
        return np.where(budget >= self._least_kept[cuts], _LESS * budget, 1.0)

    @cached_property
    def _most_kept(self) -> Array:
        single = np.diagonal(self._kept, offset=1)
        return np.concatenate(([0.0], np.cumsum(np.where(np.isfinite(single), single, 0.0))))

    @cached_property
    def _least_kept(self) -> Array:
        least: Array = self._kept.min(axis=0, initial=np.inf)
        return least

    @cached_property
    def _rest(self) -> Rest:
        return Rest(
            self._visits.forward(),
            self._visits.backward(),
            self._ahead_s,
            self._back_s,
            self._family,
            self._disk,
        )

    def _shape(self, done: dict[int, Ways], label: int) -> Shape:
        bounds, activations, cut = list[int](), list[Activation](), 0
        while cut < self._layers:
            note = done[cut].notes[label].tolist()
            bounds.append(cut)
            activations.append(CHOICES[note[CHOICE]])
            cut, label = note[BEFORE], note[LABEL]
        ahead = tuple(bounds)
        return Shape(
            ahead,
            (*ahead, self._layers),
            min(self._family.slots, len(ahead)),
            min(self._family.gradient_buffers, len(ahead)),
            self._family.boundary,
            self._family.resident,
            0,
            tuple(activations),
            self._family.on_device,
        )
