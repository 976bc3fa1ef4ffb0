"""The fastest plan of a family under a limit of slots and memory: exact, by dynamic programming.

Forward. A visit starts when the visit before is over and its load is done; with two slots the load
starts with the visit before, with one slot after it. So the start of a visit follows from the
start of the visit before, and the turn's earliest start is a shortest path over segments.

Turn. All that backward needs of forward is when the turn starts, and which segment is in the other
slot: that one is not loaded again if backward's next segment is the same.

Backward. The rest depends on six clocks only: when compute, the next load, the last two unloads and
the updates can go on, and when the first gradients were on the host, from where on a disk works. A
later clock never makes a step end sooner, so of two ways to the same cut the one that is later (or
equal) in every clock can be forgotten.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atomtrain.planning.costing import Costing, VisitTable
from atomtrain.planning.schedule import Phase
from atomtrain.planning.shape import Shape
from atomtrain.planning.space import Allowed, Family

Array = NDArray[np.float64]
Starts = NDArray[np.intp]
_COMPUTE, _LOAD, _UNLOAD, _BEFORE, _UPDATE, _FIRST = range(6)
_SLACK = 1 + 1e-12
_LESS = 1 - 1e-12
"""Sums in another order differ by less; they are no difference."""


class _Turn(NamedTuple):
    """Where backward begins, and what is below the turn in backward."""

    start: int
    hit: int | None
    """First layer of the segment that is still in its slot."""
    keep: bool


class _Labels(NamedTuple):
    """Ways to reach a cut in backward, none of them better than another in all clocks."""

    clocks: Array  # [n, 6] seconds
    parents: list[tuple[int, int, int] | _Turn]
    """The cut, the number of segments so far (0 where it does not matter) and the index of the
    label that each one came from."""


class Found(NamedTuple):
    """A plan's shape and its step."""

    step_s: float
    shape: Shape


class Forward(NamedTuple):
    """Earliest starts."""

    starts: Array
    """Of the forward visit to each segment, `[start, stop]`."""
    turns: Array
    """Of the turn at `stop` after each last forward segment, `[start, stop]`."""


class Optimum:
    """Searches the plans of one family."""

    def __init__(self, costing: Costing, family: Family, segments: int | None) -> None:
        """`segments` fixes the number of backward segments, the turn included."""
        place = family.place
        self._family, self._segments = family, segments
        self._overlap = family.slots > 1
        self._forward = costing.table(Phase.FORWARD, place, load=True)
        self._turn = costing.table(Phase.TURN, place, load=True)
        self._backward = costing.table(Phase.BACKWARD, place, load=True)
        self._hit = costing.table(Phase.BACKWARD, place, load=False)
        self._kept = costing.table(Phase.BACKWARD, place, load=False, keep=True)
        self._layers = len(costing.layer_forward_s)
        self._disk = costing.disk
        self._backlog_s = 0.0 if costing.disk is None else costing.disk.backlog_s
        self._most_load_s = 0.0
        self._starts: dict[bytes, Forward] = {}
        self._ahead_s = np.concatenate(([0.0], np.cumsum(costing.layer_forward_s)))
        self._back_s = np.concatenate(([0.0], np.cumsum(costing.layer_backward_s)))

    def bound_s(self, allowed: Allowed) -> float:
        """Return a time below which no allowed plan can be."""
        starts = np.flatnonzero(allowed.turn)
        if not starts.size:
            return np.inf
        ahead, back = self._ahead_s, self._back_s
        saved = np.where(allowed.keep, np.maximum(ahead[None, :] - ahead[:, None], 0.0), 0.0)
        compute = ahead[starts] + back[-1] - saved.max(axis=0, initial=0.0)[starts]
        # A range loaded at once takes no longer than in parts.
        loads = self._turn.load_s[starts, self._layers] + self._forward.load_s[0, starts]
        first, last = self._ends(allowed, starts)
        alone = first + last
        if not self._overlap:  # no load hides behind compute
            alone = np.maximum(alone, loads + self._backward.load_s[0, starts] + last)
        if self._family.gradient_buffers == 1:  # nor does an unload, but it may behind a load
            unloads = self._turn.unload_s[starts, self._layers] + self._backward.unload_s[0, starts]
            alone = np.maximum(alone, first + unloads)
        least = np.maximum(compute + alone, loads)
        if self._disk is not None:
            # The first gradients come after forward and the turn.
            first = ahead[starts] + back[-1] - back[starts]
            least = np.maximum(least, first + self._disk.working_s)
        return float(least.min())

    def _ends(self, allowed: Allowed, starts: Starts) -> tuple[Array, Array]:
        """Return what is before any compute and after it, at least, for each start of the turn:
        the first load; the last unload and its update."""
        turn, backward, count = self._turn, self._backward, self._layers
        first = np.where(allowed.forward[0], self._forward.load_s[0], np.inf).min()
        last = np.where(allowed.backward[0], backward.unload_s[0] + backward.update_s[0], np.inf)
        kept = np.where(allowed.keep[0], self._kept.unload_s[0] + self._kept.update_s[0], np.inf)
        tail = min(last.min(), kept.min())
        whole = turn.unload_s[0, count] + turn.update_s[0, count]
        return (
            np.where(starts == 0, turn.load_s[0, count], first),
            np.where(starts == 0, whole, tail),
        )

    def best(self, allowed: Allowed, below_s: float = np.inf) -> Found | None:
        """Return the fastest allowed plan, or `None` if none is faster than `below_s`."""
        self._most_load_s = float(self._backward.loading_s[allowed.backward].max(initial=0.0))
        forward = self._forwards(allowed)
        labels = self._begin(allowed, forward, below_s)
        done: dict[tuple[int, int], _Labels] = {}
        for cut in range(self._layers - 1, -1, -1):
            for count in sorted({n for at, n in labels if at == cut}):
                here = _pareto(labels.pop((cut, count)))
                done[cut, count] = here
                if cut:
                    self._extend(cut, count, here, allowed, below_s, labels)
        ends = [
            (float(value), key, index)
            for key, here in done.items()
            if key[0] == 0 and (self._segments or 0) == key[1]
            for index, value in enumerate(self._step_ends(here.clocks))
        ]
        if not ends or min(ends)[0] >= below_s:
            return None
        return self._found(*min(ends), done, forward, allowed)

    def _forwards(self, allowed: Allowed) -> Forward:
        """Return the earliest starts, remembered for limits that allow the same segments."""
        key = allowed.forward.tobytes()
        if key not in self._starts:
            self._starts[key] = self._forward_pass(allowed)
        return self._starts[key]

    def _forward_pass(self, allowed: Allowed) -> Forward:
        count, table, turn = self._layers, self._forward, self._turn
        visit_s = table.visit_s
        starts = np.full((count + 1, count + 1), np.inf)
        starts[0] = np.where(allowed.forward[0], table.loading_s[0], np.inf)
        for at in range(1, count):
            before, lasting = starts[:at, at, None], visit_s[:at, at, None]
            loads = table.loading_s[at][None, :]
            ends = before + (np.maximum(lasting, loads) if self._overlap else lasting + loads)
            starts[at] = np.where(allowed.forward[at], ends.min(axis=0), np.inf)
        loads = turn.loading_s[:, count][None, :]
        turns = starts + (np.maximum(visit_s, loads) if self._overlap else visit_s + loads)
        turns = np.maximum(turns, self._backlog_s)
        return Forward(starts, turns)

    def _begin(
        self, allowed: Allowed, forward: Forward, below_s: float
    ) -> dict[tuple[int, int], list[_Labels]]:
        """Return the labels after the turn, and after the segment that needs no load."""
        labels: dict[tuple[int, int], list[_Labels]] = {}
        one, two = (1, 2) if self._segments else (0, 0)
        for start in map(int, np.flatnonzero(allowed.turn)):
            if start == 0:
                starts = np.maximum([self._turn.loading_s[0, self._layers]], self._backlog_s)
            else:
                starts = forward.turns[:start, start]
            after = self._after_turn(start, starts)
            first = int(np.argmin(starts))
            if self._hopeful(after[[first]], self._back_s[start], below_s)[0]:
                turn = _Turn(start, None, False)
                _add(labels, (start, one), _Labels(after[[first]], [turn]))
            if start == 0 or not self._overlap:
                continue
            for keep, table, which in (
                (False, self._hit, allowed.backward),
                (True, self._kept, allowed.keep),
            ):
                lows = np.flatnonzero(which[:start, start] & np.isfinite(starts))
                clocks = self._visit(after[lows], table, lows, start)
                hopeful = self._hopeful(clocks, self._back_s[lows], below_s)
                for row in map(int, np.flatnonzero(hopeful)):
                    turn = _Turn(start, int(lows[row]), keep)
                    _add(labels, (int(lows[row]), two), _Labels(clocks[[row]], [turn]))
        return labels

    def _after_turn(self, start: int, starts_s: Array) -> Array:
        """Return the clocks after the turn for each time at which it may start, `[n, 6]`."""
        table, stop = self._turn, self._layers
        compute = starts_s + table.visit_s[start, stop]
        unload = compute + table.unload_s[start, stop]
        update = unload + table.update_s[start, stop]
        load = starts_s if self._overlap else compute
        clocks = [compute, load, unload, np.zeros_like(load), update, unload]
        return np.stack(clocks, axis=1)

    def _hopeful(self, clocks: Array, left_s: Any, below_s: float) -> NDArray[np.bool_]:
        """Return which labels can still end below a limit, with so much compute left at least."""
        working_s = 0.0 if self._disk is None else self._disk.working_s
        ends = np.maximum(clocks[:, _COMPUTE] + left_s, clocks[:, _FIRST] + working_s)
        hopeful: NDArray[np.bool_] = ends <= below_s * _SLACK
        return hopeful

    def _step_ends(self, clocks: Array) -> Array:
        """Return when steps end."""
        if self._disk is None:
            return clocks[:, _UPDATE]
        updated = clocks[:, _UPDATE] + self._disk.last_s
        ends: Array = np.maximum(updated, clocks[:, _FIRST] + self._disk.working_s)
        return ends

    def _visit(self, clocks: Array, table: VisitTable, start: int | Starts, stop: int) -> Array:
        """Return the clocks after a backward visit.

        Args:
            clocks: `[n, 6]`, or `[n, 1, 6]` with several segments.
            table: Seconds of the visit.
            start: First layer of the segment, or those of several.
            stop: The layer after its last one.
        """
        compute, load, unload, before, update, first = (clocks[..., i] for i in range(6))
        loaded = load + table.loading_s[start, stop]
        ready = np.maximum(compute, loaded)
        empty = unload if self._family.gradient_buffers == 1 else before
        end = np.maximum(ready, empty) + table.visit_s[start, stop]
        unloaded = np.maximum(unload, end) + table.unload_s[start, stop]
        updated = np.maximum(update, unloaded) + table.update_s[start, stop]
        # A load that can start so early that it never holds compute up may as well start later.
        next_load = np.maximum(ready, end - self._most_load_s) if self._overlap else end
        after = np.empty((*end.shape, 6))
        after[..., _COMPUTE], after[..., _LOAD] = end, next_load
        after[..., _UNLOAD], after[..., _UPDATE] = unloaded, updated
        # A disk that is done before compute holds nobody up.
        working_s = 0.0 if self._disk is None else self._disk.working_s
        after[..., _FIRST] = np.maximum(first, end - working_s)
        # An unload that is over before compute is free holds nobody up.
        single = self._family.gradient_buffers == 1
        after[..., _BEFORE] = 0.0 if single else np.maximum(unload, end)
        return after

    def _extend(
        self,
        cut: int,
        count: int,
        here: _Labels,
        allowed: Allowed,
        below_s: float,
        labels: dict[tuple[int, int], list[_Labels]],
    ) -> None:
        """Add the labels that one more segment makes of those at a cut."""
        if self._segments is not None and count >= self._segments:
            return
        hopeful = np.flatnonzero(self._hopeful(here.clocks, self._back_s[cut], below_s))
        starts = np.flatnonzero(allowed.backward[:, cut])
        if not hopeful.size or not starts.size:
            return
        after = self._visit(here.clocks[hopeful][:, None, :], self._backward, starts, cut)
        for column, start in enumerate(map(int, starts)):
            parents: list[tuple[int, int, int] | _Turn]
            parents = [(cut, count, int(index)) for index in hopeful]
            key = (start, count + 1 if self._segments else 0)
            _add(labels, key, _Labels(after[:, column], parents))

    def _found(
        self,
        step_s: float,
        key: tuple[int, int],
        index: int,
        done: dict[tuple[int, int], _Labels],
        forward: Forward,
        allowed: Allowed,
    ) -> Found:
        """Follow the parents back to the turn, and forward's from there."""
        bounds = [key[0]]
        parent = done[key].parents[index]
        while not isinstance(parent, _Turn):
            bounds.append(parent[0])
            parent = done[parent[:2]].parents[parent[2]]
        if parent.hit is not None:
            bounds.append(parent.start)
        bounds.append(self._layers)
        activations = ["recompute"] * (len(bounds) - 1)
        if parent.keep:
            activations[-2] = "keep"
        ahead = self._forward_bounds(parent, forward)
        return Found(
            step_s,
            Shape(
                ahead,
                tuple(bounds),
                min(self._family.slots, len(ahead)),
                min(self._family.gradient_buffers, len(bounds) - 1),
                self._family.boundary,
                self._family.resident,
                0,
                tuple(activations),  # type: ignore[arg-type]
                self._family.on_device,
            ),
        )

    def _forward_bounds(self, turn: _Turn, forward: Forward) -> tuple[int, ...]:
        """Return the forward partition with which the turn starts soonest."""
        if turn.start == 0:
            return (0,)
        last = turn.hit
        if last is None:
            last = int(np.argmin(forward.turns[: turn.start, turn.start]))
        bounds = [turn.start, last]
        visit_s, load_s = self._forward.visit_s, self._forward.loading_s
        while last:
            stop = bounds[-2]
            lasting, load = visit_s[:last, last], load_s[last, stop]
            ends = np.maximum(lasting, load) if self._overlap else lasting + load
            last = int(np.argmin(forward.starts[:last, last] + ends))
            bounds.append(last)
        return tuple(reversed(bounds))


def _add(labels: dict[tuple[int, int], list[_Labels]], key: tuple[int, int], more: _Labels) -> None:
    labels.setdefault(key, []).append(more)


def _pareto(parts: list[_Labels]) -> _Labels:
    """Return the labels that no other one beats or equals in every clock."""
    clocks = np.concatenate([part.clocks for part in parts])
    parents = [parent for part in parts for parent in part.parents]
    if len(parents) == 1:
        return _Labels(clocks, parents)
    order = np.lexsort(clocks.T[::-1])
    left, kept = order, []
    less = clocks * _LESS
    while left.size:
        # The first in order is beaten by none that is left.
        kept.append(int(left[0]))
        left = left[1:][(clocks[left[1:]] < less[left[0]]).any(axis=1)]
    return _Labels(clocks[kept], [parents[index] for index in kept])
