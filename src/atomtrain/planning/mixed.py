"""The fastest plan that keeps or offloads what forward saves: exact, by dynamic programming.

Forward and backward have one partition here, and each segment below the turn its own choice. From
the turn downwards: some segments are kept, then any are recomputed or offloaded. A way to a cut is
described by

- the clocks of `planning/clocks.py`, to which the forward visits passed so far are added, because
  the turn begins that much later and all clocks with it (they are kept apart where the turn may
  have to wait for updates of the step before);
- the load of the segment above: the forward visit below covers it;
- the room: how many bytes may be kept below, so that no visit above has too little memory. As kept
  segments are next to the turn, it matters only while segments are kept.

A later clock, a longer load and less room never make a plan better, so of two ways to a cut the one
that is worse (or equal) in all of them can be forgotten. The window of transfers is reserved from
the turn to the lowest offloaded segment: ways with and without a window are apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atomtrain.planning.clocks import CLOCKS, COMPUTE, SLACK, Clocks, undominated
from atomtrain.planning.optimum import Found
from atomtrain.planning.room import Room, Rooms, Saving
from atomtrain.planning.schedule import Phase
from atomtrain.planning.shape import Activation, Shape
from atomtrain.planning.space import Bytes, Family, Space
from atomtrain.planning.tables import VisitTable

Array = NDArray[np.float64]
_ABOVE, _ROOM, _AHEAD = CLOCKS, CLOCKS + 1, CLOCKS + 2  # columns behind the clocks
_LESS = -1.0  # more room is better: its negative is compared


class Way(NamedTuple):
    """Where a way from the turn downwards is."""

    cut: int
    segments: int
    """So far, the turn included; 0 where their number does not matter."""
    keeping: bool
    """Only kept segments so far."""
    window: bool
    """The window is reserved: offloaded segments may follow."""


class _Step(NamedTuple):
    """The last segment of a way, and where the way was before."""

    before: Way | None
    """`None`: the segment is the turn."""
    label: int
    """The label there."""
    activation: Activation


class _Labels(NamedTuple):
    """Ways to one place, none of them better than another in all columns."""

    values: Array  # [n, 9]: clocks, load of the segment above, room times -1, forward
    steps: list[_Step]


class Mixed:
    """Searches the plans of one family."""

    def __init__(self, space: Space, family: Family, *, offload: bool = True) -> None:
        """`offload`: whether segments may be offloaded."""
        self._space, self._family = space, family
        self._segments, self._layers = space.request.segments, space.layers
        self._overlap = family.slots > 1
        self.rooms = Rooms(space, family, offload=offload)
        """What may be kept under which limit of memory."""
        self._kept, self._window_bytes = self.rooms.kept, self.rooms.window_bytes
        self._choices, self._keeps = self.rooms.choices, self.rooms.keeps
        self._turn = space.costing.table(Phase.TURN, family.place, load=True)
        self._disk = space.costing.disk
        self._backlog_s = 0.0 if self._disk is None else self._disk.backlog_s
        self._clocks = self._new_clocks(0.0)
        ahead, back = space.costing.layer_forward_s, space.costing.layer_backward_s
        self._ahead_s = np.concatenate(([0.0], np.cumsum(ahead)))
        self._back_s = np.concatenate(([0.0], np.cumsum(back)))
        # The least time of both visits to all layers below a cut.
        self._least_s = np.maximum(self._ahead_s, self._back_s)
        self._recomputed_s = self._ahead_s + self._back_s - self._least_s
        # Before the first visit there is its load, after the last one its unload and update.
        last = self._backward("recompute", load=True)
        self._ends_s = float(
            self._forward("recompute").loading_s[0, 1] + last.unload_s[0, 1] + last.update_s[0, 1]
        )
        self._saving = Saving(space, "offload" in self._choices)

    def bound_s(self, turn: Bytes) -> float:
        """Return a time below which no plan can be to whose turns so much room is left."""
        starts = np.flatnonzero(turn >= 0)
        if not starts.size:
            return np.inf
        # A range loaded at once takes no longer than in parts.
        loads = self._turn.loading_s[starts, self._layers]
        loads = loads + self._forward("recompute").loading_s[0, starts]
        ahead = self._ahead_s[starts]
        back = self._least_s[starts] - ahead + self._back_s[-1] - self._back_s[starts]
        again = self._saving.again_s(self._recomputed_s[starts], turn[starts])
        compute = self._saving.least_s(ahead, back, again)
        alone = np.zeros_like(loads)
        if not self._overlap:
            alone = loads + self._backward("recompute", load=True).loading_s[0, starts]
        if self._overlap:
            alone = alone + self._ends_s
        return float(np.maximum(compute + alone, loads).min())

    def best(
        self, slot_sizes: Sequence[int], device_bytes: int, below_s: float = np.inf
    ) -> Found | None:
        """Return the fastest plan within a limit of device memory with slots of one of these
        sizes, or `None` if none is faster than `below_s`.

        First as if a slot were as large as the largest and took no more than the smallest: what is
        found is the best if it fits. If not, the sizes are halved.
        """
        if self.bound_s(self.rooms.turn(slot_sizes, device_bytes)) >= below_s:
            return None
        found = self._best(self.rooms.room(slot_sizes, device_bytes), below_s)
        if found is None or self._space.memory.device_bytes(found.shape) <= device_bytes:
            return found
        assert len(slot_sizes) > 1
        middle, best = len(slot_sizes) // 2, None
        for some in (slot_sizes[:middle], slot_sizes[middle:]):
            better = self.best(some, device_bytes, below_s)
            if better is not None:
                best, below_s = better, better.step_s
        return best

    def _best(self, room: Room, below_s: float) -> Found | None:
        """Return the fastest plan with this room, or `None` if none is faster than `below_s`."""
        loads = self._backward("recompute", load=True).loading_s
        fits = (room.recompute >= 0) | (room.keep >= 0) | (room.offload >= 0)
        self._clocks = self._new_clocks(float(loads[fits].max(initial=0.0)))
        labels: dict[Way, list[_Labels]] = {}
        self._begin(room, below_s, labels)
        done: dict[Way, _Labels] = {}
        for cut in range(self._layers - 1, 0, -1):
            for way in sorted(way for way in labels if way.cut == cut):
                here = done[way] = _best_of(labels.pop(way))
                self._extend(way, here, room, below_s, labels)
        ends = []
        for way, parts in labels.items():
            if way.cut == 0 and (self._segments or 0) == way.segments:
                here = done[way] = _best_of(parts)
                first_s = here.values[:, _AHEAD] + here.values[:, _ABOVE]
                turns_s = np.maximum(first_s, self._backlog_s)
                steps_s = turns_s + self._clocks.ends(here.values, turns_s)
                ends += [(float(value), way, index) for index, value in enumerate(steps_s)]
        if not ends or min(ends)[0] >= below_s:
            return None
        step_s, way, index = min(ends)
        return Found(step_s, self._shape(done, way, index))

    # Tables are made when they are first needed: most families are never searched.
    def _forward(self, activation: Activation) -> VisitTable:
        table, place = self._space.costing.table, self._family.place
        return table(Phase.FORWARD, place, load=True, activation=activation)

    def _backward(self, activation: Activation, *, load: bool) -> VisitTable:
        table, place = self._space.costing.table, self._family.place
        return table(Phase.BACKWARD, place, load=load, activation=activation)

    def _new_clocks(self, most_load_s: float) -> Clocks:
        buffers = self._family.gradient_buffers
        return Clocks(
            overlap=self._overlap,
            gradient_buffers=buffers,
            most_load_s=most_load_s,
            disk=self._disk,
        )

    def _begin(self, room: Room, below_s: float, labels: dict[Way, list[_Labels]]) -> None:
        """Add the labels after the turn."""
        windows = (False, True) if "offload" in self._choices else (False,)
        for start in map(int, np.flatnonzero(room.turn >= 0)):
            clocks = self._clocks.after_turn(self._turn, start, self._layers, np.zeros(1))
            if clocks[0, COMPUTE] + self._least_s[start] + self._ends_s > below_s * SLACK:
                continue
            for window in windows:
                left = room.turn[start] - window * self._window_bytes
                if left >= 0:
                    load_s = self._turn.loading_s[start, self._layers]
                    values = np.array([[*clocks[0], load_s, _LESS * left, 0.0]])
                    way = Way(start, int(self._segments is not None), True, window)
                    _add(labels, way, _Labels(values, [_Step(None, 0, "recompute")]))

    def _extend(
        self,
        way: Way,
        here: _Labels,
        room: Room,
        below_s: float,
        labels: dict[Way, list[_Labels]],
    ) -> None:
        """Add the labels that one more segment makes of those at a cut."""
        if self._segments is not None and way.segments >= self._segments:
            return
        count = way.segments + (self._segments is not None)
        # The last segment below the turn still is in its slot if there are two.
        turn = np.array([step.before is None for step in here.steps])
        window = way.window * self._window_bytes
        cut = way.cut
        for activation in self._choices:
            if activation == "offload" and not way.window:
                continue
            left = (room.recompute if activation == "recompute" else room.offload)[:cut, cut]
            starts = np.flatnonzero(left >= window)
            nexts = [Way(cut, count, False, way.window)]
            if activation == "offload":  # the last one, maybe
                nexts.append(Way(cut, count, False, False))
            nothing = np.zeros((len(turn), starts.size))
            self._visit(way, here, turn, activation, starts, nothing, nexts, below_s, labels)
        if self._keeps and way.keeping:
            left = room.keep[:cut, cut] - window
            starts = np.flatnonzero(left >= 0)
            before = _LESS * here.values[:, _ROOM]
            after = np.minimum(
                before[:, None] - self._kept[starts, cut][None, :], left[starts][None, :]
            )
            nexts = [Way(cut, count, True, way.window)]
            self._visit(way, here, turn, "keep", starts, after, nexts, below_s, labels)

    def _visit(
        self,
        way: Way,
        here: _Labels,
        turn: NDArray[np.bool_],
        activation: Activation,
        starts: NDArray[np.intp],
        room: Array,
        nexts: list[Way],
        below_s: float,
        labels: dict[Way, list[_Labels]],
    ) -> None:
        """Add the labels after visits to segments that begin at `starts`; room is `[n, starts]`."""
        if not starts.size:
            return
        cut, ahead = way.cut, self._forward(activation)
        clocks, above = here.values[:, None, :CLOCKS], here.values[:, _ABOVE, None]
        lasting = ahead.visit_s[starts, cut][None, :]
        later = np.maximum(lasting, above) if self._overlap else lasting + above
        table = self._backward(activation, load=True)
        after = self._clocks.after_visit(clocks, table, starts, cut)
        if self._overlap and turn.any():
            table = self._backward(activation, load=False)
            after[turn] = self._clocks.after_visit(clocks[turn], table, starts, cut)
        forward = np.zeros_like(later)
        if self._backlog_s:
            forward = here.values[:, _AHEAD, None] + later
        else:
            after = after + later[:, :, None]
        rest = self._rest_s(starts, room, nexts[0])
        hopeful = (after[..., COMPUTE] + forward + rest <= below_s * SLACK) & (room >= 0)
        for column, start in enumerate(map(int, starts)):
            rows = np.flatnonzero(hopeful[:, column])
            if not rows.size:
                continue
            values = np.empty((rows.size, CLOCKS + 3))
            values[:, :CLOCKS] = after[rows, column]
            values[:, _ABOVE] = ahead.loading_s[start, cut]
            values[:, _ROOM] = _LESS * room[rows, column]
            values[:, _AHEAD] = forward[rows, column]
            steps = [_Step(way, int(row), activation) for row in rows]
            for following in nexts:
                _add(labels, following._replace(cut=start), _Labels(values, steps))

    def _rest_s(self, starts: NDArray[np.intp], room: Array, following: Way) -> Array:
        """Return a time below which the rest of the step cannot be, `[n, starts]`."""
        if following.window:
            again = np.zeros(starts.size)
        elif following.keeping:
            again = self._saving.again_s(self._recomputed_s[starts][None, :], room)
        else:
            again = self._recomputed_s[starts]
        return np.broadcast_to(self._least_s[starts] + again + self._ends_s, room.shape)

    def _shape(self, done: dict[Way, _Labels], way: Way, index: int) -> Shape:
        """Follow the steps back to the turn."""
        bounds, activations = [], list[Activation]()
        before: Way | None = way
        while before is not None:
            bounds.append(before.cut)
            step = done[before].steps[index]
            activations.append(step.activation)
            before, index = step.before, step.label
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
            self._family.early,
        )


def _add(labels: dict[Way, list[_Labels]], way: Way, more: _Labels) -> None:
    labels.setdefault(way, []).append(more)


def _best_of(parts: list[_Labels]) -> _Labels:
    values = np.concatenate([part.values for part in parts])
    steps = [step for part in parts for step in part.steps]
    kept = undominated(values)
    return _Labels(values[kept], [steps[index] for index in kept])
