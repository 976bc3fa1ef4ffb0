"""Plans of a family with slots of several sizes: as few of these as possible are searched on their
own.

The bound of each size alone is cheap and near: most sizes are left out by it. Where plans keep or
offload, the others are searched at once, as if a slot were as large as the largest and took no more
than the smallest. What is found so is the best of all if it fits. If not, its own size parts the
others: with smaller slots its largest segment has no place, and larger ones leave as little room as
its own.
"""

from __future__ import annotations

import bisect
import functools
import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np

from atomtrain.planning.search.activation_dp import Mixed
from atomtrain.planning.search.partition_dp import Found, Optimum
from atomtrain.planning.search.space import Family, Space
from atomtrain.planning.search.tasks import Task, fastest


class _BySize(ABC):
    """Plans with slots of one of some sizes, under a limit of device memory."""

    def __init__(self, space: Space, family: Family, device_bytes: int) -> None:
        """Some plan of the family holds less than `device_bytes`."""
        self._space, self._family, self._device_bytes = space, family, device_bytes
        self._sizes = space.slot_sizes_within(family, device_bytes)
        self._bounds_s: dict[tuple[int, int], float] = {}

    @abstractmethod
    def _bound_of(self, sizes: Sequence[int]) -> float:
        """Return a time below which no plan with slots of these sizes is."""

    def loose_bound_s(self) -> float:
        return self._range_bound_s(0, len(self._sizes))

    def bound_s(self) -> float:
        return next((bound_s for bound_s, _ in self._by_bound()), np.inf)

    def _hopeful(self, below_s: float) -> list[int]:
        hopeful = []
        for bound_s, size in self._by_bound():
            if bound_s >= below_s:
                break
            hopeful.append(size)
        return sorted(hopeful)

    def _by_bound(self) -> Iterator[tuple[float, int]]:
        """Yield sizes by their bounds, which are made only of those whose turn it might be: what no
        size of a range is below is known first."""
        waiting = [(self.loose_bound_s(), 0, len(self._sizes))]
        while waiting:
            bound_s, start, stop = heapq.heappop(waiting)
            if stop == start + 1:
                yield bound_s, self._sizes[start]
                continue
            middle = (start + stop) // 2
            for half in ((start, middle), (middle, stop)):
                heapq.heappush(waiting, (max(bound_s, self._range_bound_s(*half)), *half))

    def _range_bound_s(self, start: int, stop: int) -> float:
        key = start, stop
        if key not in self._bounds_s:
            self._bounds_s[key] = self._bound_of(self._sizes[start:stop])
        return self._bounds_s[key]


class Recomputing(_BySize):
    def __init__(self, space: Space, family: Family, optimum: Optimum, device_bytes: int) -> None:
        super().__init__(space, family, device_bytes)
        self._optimum = optimum

    def best(self, below_s: float) -> Found | None:
        hopeful = set(self._hopeful(below_s))
        some = self._space.different(self._family, self._device_bytes) if hopeful else ()
        parts = [
            Task(self._optimum.bound_s(allowed), functools.partial(self._within, slot_bytes))
            for slot_bytes, allowed in some
            if slot_bytes in hopeful
        ]
        return fastest(parts, below_s)

    def _within(self, slot_bytes: int, below_s: float) -> Found | None:
        allowed = self._space.allowed(self._family, slot_bytes, self._device_bytes)
        return self._optimum.best(allowed, below_s)

    def _bound_of(self, sizes: Sequence[int]) -> float:
        allowed = self._space.allowed_of(self._family, sizes, self._device_bytes)
        return self._optimum.bound_s(allowed)


class Mixing(_BySize):
    def __init__(self, space: Space, family: Family, mixed: Mixed, device_bytes: int) -> None:
        super().__init__(space, family, device_bytes)
        self._mixed = mixed

    def loosest(self, below_s: float) -> Found | None:
        """Return a plan of all sizes at once, or `None` if none is faster than `below_s`. If it
        fits it is the best of them."""
        return self._loosest(self._hopeful(below_s), below_s)

    def best(self, below_s: float) -> Found | None:
        return self._best(self._hopeful(below_s), below_s)

    def _best(self, sizes: Sequence[int], below_s: float) -> Found | None:
        found, memory = self._loosest(sizes, below_s), self._space.memory
        if found is None or memory.device_bytes(found.shape) <= self._device_bytes:
            return found
        middle = bisect.bisect_left(sizes, memory.sizes(found.shape).slot_bytes)
        assert 0 < middle < len(sizes)
        best: Found | None = None
        for some in (sizes[:middle], sizes[middle:]):
            hopeful = set(self._hopeful(below_s)) & set(some)
            better = self._best(sorted(hopeful), below_s)
            if better is not None:
                best, below_s = better, better.step_s
        return best

    def _loosest(self, sizes: Sequence[int], below_s: float) -> Found | None:
        if not sizes:
            return None
        return self._mixed.best(self._mixed.rooms.room(sizes, self._device_bytes), below_s)

    def _bound_of(self, sizes: Sequence[int]) -> float:
        return self._mixed.bound_s(self._mixed.rooms.room(sizes, self._device_bytes))
