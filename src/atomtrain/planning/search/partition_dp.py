"""The fastest plan of a family under a limit of slots and memory: exact, by dynamic programming.

Forward. A visit starts when the visit before is over and its load is done; with two slots the load
starts with the visit before, with one slot after it. So the start of a visit follows from the
start of the visit before, and the turn's earliest start is a shortest path over segments.

Turn. All that backward needs of forward is when the turn starts, and which segment is in the other
slot: that one is not loaded again if backward's next segment is the same.

Backward. The rest depends on the clocks of `dp_state.py` only. Every segment is recomputed
here; `activation_dp.py` has the plans that keep or offload.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atomtrain.planning.cost.costing import Costing
from atomtrain.planning.plan.shape import Activation, Phase, Shape
from atomtrain.planning.search.dp_state import Clocks, Lasting, Starts, undominated
from atomtrain.planning.search.space import Allowed, Family

Array = NDArray[np.float64]


class _Turn(NamedTuple):
    """Where backward begins, and what is below the turn in backward."""

    start: int
    hit: int | None
    """First layer of the segment that is still in its slot."""


class _Labels(NamedTuple):
    """Ways to reach a cut in backward, none of them better than another in all clocks."""

    clocks: Array  # [n, 6] seconds
    parents: list[tuple[int, int, int] | _Turn]
    """The cut, the number of segments so far (0 where it does not matter) and the index of the
    label that each one came from."""


class Found(NamedTuple):
    step_s: float
    shape: Shape


class Forward(NamedTuple):
    starts: Array
    """Of the forward visit to each segment, `[start, stop]`."""
    turns: Array
    """Of the turn at `stop` after each last forward segment, `[start, stop]`."""


class PartitionDP:
    def __init__(self, costing: Costing, family: Family, segments: int | None) -> None:
        """`segments` fixes the number of backward segments, the turn included."""
        place = family.place
        self._family, self._segments = family, segments
        self._overlap = family.slots > 1
        self._forward = costing.table(Phase.FORWARD, place, load=True)
        self._turn = costing.table(Phase.TURN, place, load=True)
        self._backward = costing.table(Phase.BACKWARD, place, load=True)
        self._hit = costing.table(Phase.BACKWARD, place, load=False)
        self._layers = len(costing.layer_forward_s)
        self._disk = costing.disk_work(place.on_device)
        self._backlog_s = 0.0 if self._disk is None else self._disk.backlog_s
        self._clocks = Clocks(family, self._disk)
        self._starts: dict[bytes, Forward] = {}
        self._ahead_s = np.concatenate(([0.0], np.cumsum(costing.layer_forward_s)))
        self._back_s = np.concatenate(([0.0], np.cumsum(costing.layer_backward_s)))

    def bound_s(self, allowed: Allowed) -> float:
        starts = np.flatnonzero(allowed.turn)
        if not starts.size:
            return np.inf
        compute = self._ahead_s[starts] + self._back_s[-1]
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
            first = compute - self._back_s[starts]
            least = np.maximum(least, first + self._disk.working_s)
        return float(least.min())

    def _ends(self, allowed: Allowed, starts: Starts) -> tuple[Array, Array]:
        """Return what is before any compute and after it, at least, for each start of the turn:
        the first load; the last unload and its update."""
        turn, backward, count = self._turn, self._backward, self._layers
        first = np.where(allowed.forward[0], self._forward.load_s[0], np.inf).min()
        last = np.where(allowed.backward[0], backward.unload_s[0] + backward.update_s[0], np.inf)
        tail = last.min()
        whole = turn.unload_s[0, count] + turn.update_s[0, count]
        return (
            np.where(starts == 0, turn.load_s[0, count], first),
            np.where(starts == 0, whole, tail),
        )

    def best(self, allowed: Allowed, below_s: float = np.inf) -> Found | None:
        """Return the fastest allowed plan, or `None` if none is faster than `below_s`."""
        most_load_s = float(self._backward.loading_s[allowed.backward].max(initial=0.0))
        self._clocks = Clocks(self._family, self._disk, most_load_s)
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
            for index, value in enumerate(self._clocks.ends(here.clocks))
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
        labels: dict[tuple[int, int], list[_Labels]] = {}
        one, two = (1, 2) if self._segments else (0, 0)
        for start in map(int, np.flatnonzero(allowed.turn)):
            if start == 0:
                starts = np.maximum([self._turn.loading_s[0, self._layers]], self._backlog_s)
            else:
                starts = forward.turns[:start, start]
            after = self._clocks.after_turn(self._turn, start, self._layers, starts)
            first = int(np.argmin(starts))
            if self._clocks.hopeful(after[[first]], self._back_s[start], below_s)[0]:
                _add(labels, (start, one), _Labels(after[[first]], [_Turn(start, None)]))
            if start == 0 or not self._overlap:
                continue
            lows = np.flatnonzero(allowed.backward[:start, start] & np.isfinite(starts))
            clocks = self._clocks.after_visit(after[lows], Lasting.of(self._hit, lows, start))
            hopeful = self._clocks.hopeful(clocks, self._back_s[lows], below_s)
            for row in map(int, np.flatnonzero(hopeful)):
                turn = _Turn(start, int(lows[row]))
                _add(labels, (int(lows[row]), two), _Labels(clocks[[row]], [turn]))
        return labels

    def _extend(
        self,
        cut: int,
        count: int,
        here: _Labels,
        allowed: Allowed,
        below_s: float,
        labels: dict[tuple[int, int], list[_Labels]],
    ) -> None:
        if self._segments is not None and count >= self._segments:
            return
        hopeful = np.flatnonzero(self._clocks.hopeful(here.clocks, self._back_s[cut], below_s))
        starts = np.flatnonzero(allowed.backward[:, cut])
        if not hopeful.size or not starts.size:
            return
        before = here.clocks[hopeful][:, None, :]
        after = self._clocks.after_visit(before, Lasting.of(self._backward, starts, cut))
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
        bounds = [key[0]]
        parent = done[key].parents[index]
        while not isinstance(parent, _Turn):
            bounds.append(parent[0])
            parent = done[parent[:2]].parents[parent[2]]
        if parent.hit is not None:
            bounds.append(parent.start)
        bounds.append(self._layers)
        everywhere: tuple[Activation, ...] = ("recompute",)
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
                everywhere * (len(bounds) - 1),
                self._family.on_device,
            ),
        )

    def _forward_bounds(self, turn: _Turn, forward: Forward) -> tuple[int, ...]:
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
    clocks = np.concatenate([part.clocks for part in parts])
    parents = [parent for part in parts for parent in part.parents]
    kept = undominated(clocks)
    return _Labels(clocks[kept], [parents[index] for index in kept])
