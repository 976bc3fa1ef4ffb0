"""What a limit of device memory leaves for what is kept, and the least with which a plan works."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atomtrain.errors import PlanError
from atomtrain.planning.plan.shape import Activation, Boundary
from atomtrain.planning.search.space import Bytes, Family, Space, Work

Array = NDArray[np.float64]

CHOICES: tuple[Activation, ...] = ("recompute", "keep", "offload")
"""What a segment below the turn does with what it saves, by their places in tables."""
RECOMPUTE, KEEP, OFFLOAD = range(len(CHOICES))


class ActivationBudget(NamedTuple):
    """What each segment leaves of the device memory for kept graphs of segments below; negative
    where there is too little, or where it must not be."""

    segments: Bytes
    """`[choice, start, stop]`; of what is offloaded without the window."""
    turn: Bytes
    """`[start]`."""


class Saving:
    """How much of forward need not be computed again, at best."""

    def __init__(self, space: Space, offload: bool) -> None:
        count, machine = space.memory.micro_batches, space.costing.machine
        forward_s = np.array(space.costing.layer_forward_s)
        n_bytes = np.array([float(count * n) for n in space.memory.saved.inner_bytes])
        self._forward_s, self._n_bytes = forward_s, n_bytes
        # As if layers could be kept in part: those first that save most seconds a byte.
        self._order = np.argsort(n_bytes / np.maximum(forward_s, 1e-30))
        self._kept_bytes, self._kept_s = self._saved(self._order)
        busy = forward_s > 0
        sent = np.array([float(count * n) for n in space.memory.saved.inner_sent_bytes])
        density = float((sent[busy] / forward_s[busy]).min(initial=np.inf))
        self._out_s = density / machine.unload_bytes_per_s if offload else np.inf
        self._in_s = density / machine.load_bytes_per_s if offload else np.inf

    def again_s(self, recomputed_s: Array, budget: Array) -> Array:
        """Return how much of so much recomputing is left at least, without offloading, if the
        budget for what is kept is so large."""
        again: Array = recomputed_s - np.interp(budget, self._kept_bytes, self._kept_s)
        return np.maximum(again, 0.0)

    def possible_s(
        self, recomputed_s: Array, budget: ActivationBudget, budgets: ActivationBudgets
    ) -> tuple[Array, Array]:
        """Return how much recomputing is left at least below each cut, without offloading, and how
        much of that offloading may save.

        Only layers count that are in some segment that the budget allows. `recomputed_s` is all
        recomputing below each cut, `[cut]`.
        """
        keepable = (budget.segments[KEEP] >= 0) & (budgets.kept <= budget.turn.max(initial=-1.0))
        order = self._order[_inside(keepable)[self._order]]
        again_s = recomputed_s - np.interp(budget.turn, *self._saved(order))
        again_s = np.maximum(again_s, 0.0)
        sendable = _inside(budget.segments[OFFLOAD] >= budgets.window_bytes)
        sent_s = np.concatenate(([0.0], np.cumsum(self._forward_s * sendable)))
        return again_s, np.minimum(again_s, sent_s)

    def _saved(self, order: NDArray[np.intp]) -> tuple[Array, Array]:
        return (
            np.concatenate(([0.0], np.cumsum(self._n_bytes[order]))),
            np.concatenate(([0.0], np.cumsum(self._forward_s[order]))),
        )

    def least_s(self, ahead_s: Array, back_s: Array, again: Array, most: Array) -> Array:
        """Return a time below which no step can be, with this much compute in forward below the
        turn, in all the rest, and in recomputing, of which offloading saves so much at most."""
        least: Array = ahead_s + back_s + again
        if not np.isfinite(self._out_s):
            return least
        # What is offloaded saves seconds of compute and costs seconds of the link. The sum of both
        # ways is convex in it, so it is least where a way's bound changes, or at an end.
        covered = ahead_s / self._out_s if self._out_s else again
        balanced = (back_s + again) / (1 + self._in_s)
        for at in (covered, balanced, most):
            moved = np.clip(at, 0.0, most)
            forward = np.maximum(ahead_s, moved * self._out_s)
            backward = np.maximum(back_s + again - moved, moved * self._in_s)
            least = np.minimum(least, forward + backward)
        return least


def _inside(segments: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which layers are in any of the marked segments, `[start, stop]`."""
    layers = len(segments) - 1
    # Where the longest one that begins at each cut ends.
    stops = np.where(segments.any(axis=1), layers - np.argmax(segments[:, ::-1], axis=1), 0)
    inside: NDArray[np.bool_] = np.maximum.accumulate(stops)[:-1] > np.arange(layers)
    return inside


class Reach:
    """Which cuts can be reached from the turn; first index: without and with the window."""

    def __init__(self, layers: int) -> None:
        self.keeping = np.full((2, layers + 1), -np.inf)
        """The largest budget while segments are kept; negative where they cannot be."""
        self.rest = np.zeros((2, layers + 1), bool)
        """Whether recomputed or offloaded segments lead there."""

    @property
    def done(self) -> bool:
        return bool((self.keeping[:, 0] >= 0).any() or self.rest[:, 0].any())


class ActivationBudgets:
    """What a family leaves for kept segments, and what is possible with it."""

    def __init__(self, space: Space, family: Family, *, offload: bool = True) -> None:
        """`offload`: whether segments may be offloaded."""
        self._space, self._family = space, family
        self._segments, self._layers = space.request.segments, space.layers
        self._work = space.work(family)
        self.kept = self._work.kept
        """Bytes that keeping a segment takes, `[start, stop]`; infinite where it cannot be kept."""
        self.window_bytes = space.memory.saved.window_bytes
        # Of all partitions the finest saves most: what several layers save counts at each of them.
        single = np.diagonal(self.kept, offset=1)
        self._most_bytes = float(single[np.isfinite(single)].sum()) + self.window_bytes
        self._pinned = space.request.activations
        self.offloads = offload and self._pinned in (None, "offload")
        """Whether segments may be offloaded."""
        self.keeps = self._pinned in (None, "keep")
        """Whether segments may be kept."""

    def budget(self, slot_sizes: Sequence[int], device_bytes: int) -> ActivationBudget:
        """Return what segments leave of a limit of device memory with slots of a size.

        With several sizes it is no less than with any of them: all segments fit that fit the
        largest, and slots take no more than the smallest.
        """
        left = device_bytes - self._space.held_bytes(self._family, slot_sizes[0])
        slot_bytes = slot_sizes[-1]
        sizes = self._segment_bytes
        work = self._work
        fitting = sizes <= slot_bytes
        fitting[:, -1] = False

        def of(work_bytes: Bytes, most: float) -> Bytes:
            # More than can be used is as good as what can.
            budget = np.where(fitting, left - work_bytes, -1.0)
            return np.clip(budget, -1.0, most)

        window, most = float(self.window_bytes), self._most_bytes
        recompute = np.maximum(work.forward, work.backward)
        if self._pinned is not None:  # only what cannot do as it should
            possible = work.keep if self._pinned == "keep" else work.offload
            recompute = np.where(np.isfinite(possible), np.inf, recompute)
        # In the order of `CHOICES`.
        segments = np.stack((of(recompute, window), of(work.keep, most), of(work.offload, window)))
        if not self.keeps:
            segments[KEEP] = -1.0
        if not self.offloads:
            segments[OFFLOAD] = -1.0
        return ActivationBudget(segments, self.turn(slot_sizes, device_bytes))

    def turn(self, slot_sizes: Sequence[int], device_bytes: int) -> Bytes:
        left = device_bytes - self._space.held_bytes(self._family, slot_sizes[0])
        sizes = self._segment_bytes[:, -1]
        turn = np.where(sizes <= slot_sizes[-1], left - self._work.turn, -1.0)
        turn[[0, -1]] = -1.0
        return np.clip(turn, -1.0, self._most_bytes)

    def most_bytes(self, slot_bytes: int) -> float:
        """Return a limit of device memory that is beyond what any plan needs."""
        work = self._work
        tables = (work.forward, work.backward, work.turn, work.keep, work.offload)
        busiest = max(table[np.isfinite(table)].max(initial=0.0) for table in tables)
        return float(self._space.held_bytes(self._family, slot_bytes) + busiest + self._most_bytes)

    @property
    def _segment_bytes(self) -> Bytes:
        return self._space.costing.segment_bytes(frozenset(self._family.resident))

    def works(self, budget: ActivationBudget) -> bool:
        here = Reach(self._layers)
        for window in (False, True):
            here.keeping[int(window)] = budget.turn  # the window is for the visits below
        cuts = range(self._layers - 1, 0, -1)
        if self._segments is None:
            for cut in cuts:
                self._reach(here, here, cut, budget)
            return here.done
        for _ in range(self._segments - 1):
            there = Reach(self._layers)
            for cut in cuts:
                self._reach(here, there, cut, budget)
            here = there
        return here.done

    def _reach(self, here: Reach, there: Reach, cut: int, budget: ActivationBudget) -> None:
        starts = slice(None, cut)
        recompute, keep, offload = budget.segments[:, starts, cut]
        for window in (0, 1):
            reserved, left = window * self.window_bytes, here.keeping[window, cut]
            if left >= 0:
                after = np.minimum(left - self.kept[starts, cut], keep - reserved)
                there.keeping[window, starts] = np.maximum(there.keeping[window, starts], after)
            if left < 0 and not here.rest[window, cut]:
                continue
            there.rest[window, starts] |= recompute >= reserved
            if window:
                there.rest[:, starts] |= offload >= reserved


def least_device_bytes(space: Space) -> int:
    """Return the least device bytes of any plan of the space.

    Raises:
        PlanError: there is none, because what all segments should do is not possible.
    """
    best, busy = np.inf, _Busy(space)
    # Those that need least come first: by what they find most of the others need not be looked at.
    families = sorted(space.families, key=lambda one: space.least_held(one) + busy.least(one))
    if space.recomputes:
        for family in families:
            for slot_bytes in space.slot_sizes(family):
                held = space.held_bytes(family, slot_bytes)
                if held + busy.least(family) >= best:
                    break
                best = min(best, held + _least_work(space, family, slot_bytes))
    elif whole := [family for family in families if family.whole]:
        best = min(_whole_bytes(space, family) for family in whole)
    if space.mixes:
        for family in families:
            if not family.whole:
                best = _least_mixed(space, family, busy.least(family), best)
    if not np.isfinite(best):
        raise PlanError(
            f"no plan can have activations {space.request.activations!r} with so many segments: "
            "what some layer saves hides from autograd's hooks; leave activations to the planner "
            "(None)"
        )
    return int(best)


class _Busy:
    """What the busiest visit of any plan of a family needs at least, however large its slots."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._least: dict[tuple[Boundary, bool], int] = {}

    def least(self, family: Family) -> int:
        key = family.boundary, bool(family.on_device)
        if key not in self._least:
            self._least[key] = self._of(self._space.work(family))
        return self._least[key]

    def _of(self, work: Work) -> int:
        # Forward and backward may have partitions of their own.
        ahead, back = (
            _least_path(np.minimum(one, np.minimum(work.keep, work.offload)), None)
            for one in (work.forward, work.backward)
        )
        return int(np.maximum(work.turn, np.maximum(ahead, back))[:-1].min())


def _whole_bytes(space: Space, family: Family) -> float:
    (slot_bytes,) = space.slot_sizes(family)
    return space.held_bytes(family, slot_bytes) + _least_work(space, family, slot_bytes)


def _least_mixed(space: Space, family: Family, least: int, best: float) -> float:
    """Return the least device bytes of the plans that keep or offload, or `best` if that is less.

    Found by bisection: a plan that works within a limit works within a larger one. `least` is what
    any visit needs beside what is held.
    """
    if space.least_held(family) + least >= best:
        return best
    budgets = ActivationBudgets(space, family, offload=space.request.offload)
    for slot_bytes in space.slot_sizes(family):
        low = space.held_bytes(family, slot_bytes) + least - 1
        if low + 1 >= best:
            break
        high = best if np.isfinite(best) else budgets.most_bytes(slot_bytes)
        if not budgets.works(budgets.budget([slot_bytes], int(high) - 1)):
            continue
        # Works below `high`, not below `low`.
        while high - low > 1:
            middle = (int(low) + int(high)) // 2
            if budgets.works(budgets.budget([slot_bytes], middle)):
                high = middle
            else:
                low = middle
        best = min(best, high)
    return best


def _least_work(space: Space, family: Family, slot_bytes: int) -> float:
    work = space.work(family)
    sizes = space.costing.segment_bytes(frozenset(family.resident))
    fitting = sizes <= slot_bytes
    turn = np.where(fitting[:, -1], work.turn, np.inf)
    if family.whole:
        return float(turn[0])
    segments = space.request.segments
    forward = _least_path(np.where(fitting, work.forward, np.inf), None)
    below = None if segments is None else segments - 1
    backward = _least_path(np.where(fitting, work.backward, np.inf), below)
    busiest = np.maximum(turn, np.maximum(forward, backward))
    return float(busiest[1:-1].min(initial=np.inf))


def _least_path(work: Bytes, segments: int | None) -> Bytes:
    """Return the least work of the busiest segment of a partition of layers 0 to each cut."""
    cuts = work.shape[0]
    least = np.full(cuts, np.inf)
    least[0] = 0
    if segments is None:
        for stop in range(1, cuts):
            least[stop] = np.maximum(least[:stop], work[:stop, stop]).min()
        return least
    for _ in range(segments):
        least = np.maximum(least[:, None], work).min(axis=0)
    return least
