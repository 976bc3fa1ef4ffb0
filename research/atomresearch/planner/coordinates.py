"""Searches the planner's space of plans by coordinates: one of them is changed at a time.

Where `atomtrain/planning/search` proves that nothing in the space is faster, this tries: it begins
with even partitions, and goes to the best plan that differs in one coordinate until none is better.
`Costing.step`, which plays out a plan's step on its timeline, is the judge of all of them.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from atomtrain.planning.plan.shape import Activation, Boundary, Layers, Shape
from atomtrain.planning.search.choice import Choice
from atomtrain.planning.search.space import Residency, Space

_STARTS = 12
"""From how many points it goes on."""
_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of segments that even partitions have."""


_BOUNDARIES: tuple[Boundary, ...] = ("device", "host")
_ALL = frozenset(range(1 << 12))
"""Whatever layer a segment begins with."""
_WAYS = ((0, frozenset[int]()), (1 << 12, frozenset[int]()), (0, _ALL))
"""Of all segments of a start: recomputed, kept, offloaded."""


class Point(NamedTuple):
    """A plan by its coordinates."""

    cuts: tuple[int, ...]
    """Of backward, without both ends."""
    ahead: tuple[int, ...] | None
    """Of forward, if it is another partition than backward's; all is recomputed then."""
    kept: int
    """How many segments next to the turn are kept."""
    offloaded: frozenset[int]
    """Of the others, by their first layers."""
    slots: int
    buffers: int
    boundary: Boundary
    residency: Residency


_Worth = tuple[float, float]
"""Bytes beyond the limit, and seconds; less is better."""


class CoordinateSearch:
    """Looks for a plan with the least predicted step time under a limit of device memory."""

    def __init__(self, space: Space, device_bytes: int) -> None:
        self._space, self._device_bytes = space, device_bytes
        self._layers = space.layers
        self._worths: dict[Shape, _Worth] = {}
        self._work = np.cumsum([0.0, *space.costing.layer_backward_s])

    def best(self) -> Choice | None:
        """Return the fastest plan that was found, or `None` if none that was tried fits."""
        starts = sorted(self._starts(), key=self._worth)
        found = [self._descended(point) for point in starts[:_STARTS]]
        best = min(found, key=self._worth)
        over, step_s = self._worth(best)
        if over:
            return None
        shape = self._shape(best)
        return Choice(shape, step_s, self._space.memory.device_bytes(shape))

    def _starts(self) -> Iterator[Point]:
        """Yield one for each way to divide memory: the best even partition without residents, and
        with each set of residents."""
        first = self._space.residencies[0]
        for slots, buffers, boundary in itertools.product((1, 2), (1, 2), _BOUNDARIES):
            even = (
                Point(cuts, None, kept, offloaded, slots, buffers, boundary, first)
                for cuts in (self._even(count, self._layers) for count in self._counts())
                for kept, offloaded in _WAYS
            )
            best = min(even, key=self._worth)
            yield from (best._replace(residency=one) for one in self._space.residencies)

    def _counts(self) -> list[int]:
        return [count for count in _COUNTS if count < self._layers] + [self._layers]

    def _even(self, count: int, layers: int) -> tuple[int, ...]:
        """Return the cuts of layers 0 to `layers` into so many segments of about equal work."""
        if count >= layers:
            return tuple(range(1, layers))
        whole = self._work[layers]
        cuts = {bisect.bisect_left(self._work, whole * i / count) for i in range(1, count)}
        return tuple(sorted(cut for cut in cuts if 0 < cut < layers))

    def _descended(self, point: Point) -> Point:
        while True:
            better = min(self._changed(point), key=self._worth, default=point)
            if not self._worth(better) < self._worth(point):
                return point
            point = better

    def _changed(self, point: Point) -> Iterator[Point]:
        """Yield the points that differ from one in one coordinate."""
        yield from (point._replace(slots=slots) for slots in (1, 2))
        yield from (point._replace(buffers=buffers) for buffers in (1, 2))
        for boundary in _BOUNDARIES:
            yield point._replace(boundary=boundary)
        yield from (point._replace(residency=one) for one in self._space.residencies)
        for count in self._counts():
            yield self._cut(point, self._even(count, self._layers))
        for cuts in _moved(point.cuts, self._layers):
            yield self._cut(point, cuts)
        turn = point.cuts[-1] if point.cuts else 0
        for count in range(1, turn + 1):
            yield point._replace(ahead=self._even(count, turn), kept=0, offloaded=frozenset())
        if point.ahead is not None:
            yield point._replace(ahead=None)
            for cuts in _moved(point.ahead, turn):
                yield point._replace(ahead=cuts)
            return
        starts = (0, *point.cuts[:-1]) if point.cuts else ()
        yield from (point._replace(kept=kept) for kept in range(len(starts) + 1))
        yield point._replace(offloaded=frozenset())
        for count in range(1, len(starts) + 1):  # the first of them, or the last
            yield point._replace(offloaded=frozenset(starts[:count]))
            yield point._replace(offloaded=frozenset(starts[-count:]), kept=0)
        for start in starts:
            yield point._replace(offloaded=point.offloaded.intersection(starts) ^ {start})

    def _cut(self, point: Point, cuts: tuple[int, ...]) -> Point:
        """Return the point with other cuts; segments do what those did that began nearest."""
        if point.ahead is not None and cuts[-1:] != point.cuts[-1:]:
            turn = cuts[-1] if cuts else 0
            point = point._replace(ahead=self._even(len(point.ahead) + 1, turn))
        starts, before = (0, *cuts[:-1]), (0, *point.cuts[:-1])
        offloaded = frozenset(
            start
            for start in starts
            if before[bisect.bisect_right(before, start) - 1] in point.offloaded
        )
        return point._replace(cuts=cuts, offloaded=offloaded)

    def _worth(self, point: Point) -> _Worth:
        shape = self._shape(point)
        if shape not in self._worths:
            self._worths[shape] = self._worth_of(shape)
        return self._worths[shape]

    def _worth_of(self, shape: Shape) -> _Worth:
        if not self._space.has(shape):
            return math.inf, math.inf
        over = max(0, self._space.memory.device_bytes(shape) - self._device_bytes)
        return float(over), self._space.costing.step(shape).step_s

    def _shape(self, point: Point) -> Shape:
        backward = (0, *point.cuts, self._layers)
        below = backward[:-1]
        forward = below if point.ahead is None else _bounds(point.ahead, below[-1])
        activations: list[Activation] = ["recompute"] * len(below)
        if point.ahead is None:
            segments = list(itertools.pairwise(below))
            kept = min(point.kept, len(segments))
            for index, layers in enumerate(segments):
                if index >= len(segments) - kept:
                    activations[index] = "keep"
                elif layers[0] in point.offloaded and self._fills_window(layers):
                    activations[index] = "offload"
        return Shape(
            forward,
            backward,
            min(point.slots, len(forward)),
            min(point.buffers, len(below)),
            point.boundary,
            point.residency.blocks,
            0,
            tuple(activations),
            point.residency.on_device,
        )

    def _fills_window(self, layers: Layers) -> bool:
        saved = self._space.memory.saved
        sent_bytes = self._space.memory.micro_batches * saved.of(*layers).sent_bytes
        return sent_bytes >= saved.window_bytes and saved.of(*layers).movable


def _bounds(cuts: tuple[int, ...], layers: int) -> tuple[int, ...]:
    return (0, *cuts, layers) if layers else (0,)


def _moved(cuts: tuple[int, ...], layers: int) -> Iterator[tuple[int, ...]]:
    """Yield the cuts with one moved, taken out, or put in."""
    bounds = (0, *cuts, layers)
    for index, cut in enumerate(cuts, 1):
        others = (*cuts[: index - 1], *cuts[index:])
        yield others
        low, high = bounds[index - 1], bounds[index + 1]
        for moved in {cut - 1, cut + 1, (low + cut) // 2, (cut + high + 1) // 2} - {cut}:
            if low < moved < high:
                yield tuple(sorted((*others, moved)))
    for low, high in itertools.pairwise(bounds):
        if high - low > 1:
            yield tuple(sorted((*cuts, (low + high) // 2)))
