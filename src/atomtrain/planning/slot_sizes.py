"""Plans that keep or offload, with slots of several sizes: as few of these as possible are searched
on their own.

The bound of each size alone is cheap and near: most sizes are left out by it. The others are
searched at once, as if a slot were as large as the largest and took no more than the smallest. What
is found so is the best of all if it fits. If not, its own size parts the others: with smaller slots
its largest segment has no place, and larger ones leave as little room as its own.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator, Sequence

import numpy as np

from atomtrain.planning.mixed import Mixed
from atomtrain.planning.optimum import Found


class SlotSizes:
    """The plans of a family under a limit of device memory."""

    def __init__(self, mixed: Mixed, slot_sizes: Sequence[int], device_bytes: int) -> None:
        """`slot_sizes` are those that slots may have, in increasing order."""
        self._mixed, self._sizes, self._device_bytes = mixed, slot_sizes, device_bytes
        self._bounds_s: dict[tuple[int, int], float] = {}

    def loose_bound_s(self) -> float:
        """Return a time below which no plan is, as if one were of all sizes."""
        return self._range_bound_s(0, len(self._sizes))

    def bound_s(self) -> float:
        """Return a time below which no plan is."""
        return next((bound_s for bound_s, _ in self._by_bound()), np.inf)

    def loosest(self, below_s: float) -> Found | None:
        """Return a plan of all sizes at once, or `None` if none is faster than `below_s`. If it
        fits it is the best of them."""
        return self._loosest(self._hopeful(below_s), below_s)

    def best(self, below_s: float) -> Found | None:
        """Return the fastest plan that fits, or `None` if none is faster than `below_s`."""
        return self._best(self._hopeful(below_s), below_s)

    def _best(self, sizes: Sequence[int], below_s: float) -> Found | None:
        found = self._loosest(sizes, below_s)
        if found is None or self._mixed.device_bytes(found) <= self._device_bytes:
            return found
        middle, best = bisect.bisect_left(sizes, self._mixed.slot_bytes(found)), None
        assert 0 < middle < len(sizes)
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

    def _hopeful(self, below_s: float) -> list[int]:
        """Return the sizes whose bounds are below a limit, in increasing order."""
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
            room = self._mixed.rooms.room(self._sizes[start:stop], self._device_bytes)
            self._bounds_s[key] = self._mixed.bound_s(room)
        return self._bounds_s[key]
