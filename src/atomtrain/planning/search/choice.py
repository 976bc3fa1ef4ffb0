"""Chooses among the plans of a space: the fastest, and the leanest of those about as fast.

Each family of plans is solved on its own (`partition_dp.py`, `activation_dp.py`), in tasks that are
tried by their bounds, those that promise most first, so that most are never searched.

The bound of each size of slots alone is cheap and near: most sizes are left out by it. Where plans
keep or offload, the others are searched at once, as if a slot were as large as the largest and took
no more than the smallest. What is found so is the best of all if it fits. If not, its own size
parts the others: with smaller slots its largest segment has no place, and larger ones leave no
larger budget than its own.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import heapq
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from atomtrain.planning.plan.shape import Shape
from atomtrain.planning.search.activation_dp import ActivationDP
from atomtrain.planning.search.partition_dp import Found, PartitionDP
from atomtrain.planning.search.space import Family, Space

_NEAR = (1.01, 1.04, 1.16, 1.64)
"""How far above the least that any plan could take plans are looked for, before all are."""
AS_FAST = 0.002
"""Of plans that differ by less the leaner one is better. Less than what predictions miss by: of two
plans that compute alike one waits longer, whatever the profile. And memory that a plan leaves is of
little use, since the budget is the user's to give."""


@dataclass(frozen=True)
class Task:
    """A part of the space that is searched at once, under a limit of device memory."""

    bound_s: float
    """No plan of the part is faster."""
    best: Callable[[float], Found | None]
    """Gives the part's fastest plan, or `None` if none is faster than so many seconds."""
    tighten: Callable[[], float] | None = None
    """Gives a nearer bound with more work; it is asked only if it matters."""

    @cached_property
    def tight_s(self) -> float:
        return self.bound_s if self.tighten is None else max(self.bound_s, self.tighten())


def fastest(tasks: Sequence[Task], below_s: float) -> Found | None:
    """Return the fastest plan of all parts, or `None` if none is faster than `below_s`."""
    best: Found | None = None
    # Those that promise most first: the others then end early.
    waiting = [(task.bound_s, index, False) for index, task in enumerate(tasks)]
    heapq.heapify(waiting)
    while waiting:
        bound_s, index, tight = heapq.heappop(waiting)
        if bound_s >= below_s:
            break
        if not tight:
            heapq.heappush(waiting, (tasks[index].tight_s, index, True))
            continue
        found = tasks[index].best(below_s)
        if found is not None:
            best, below_s = found, found.step_s
    return best


def limits(tasks: Iterable[Task], below_s: float) -> Iterator[float]:
    """Yield the limits of time under which plans are looked for, one after the other, until there
    is one: the nearer a limit is to what tasks promise, the less is searched under it."""
    least_s = np.inf
    for task in sorted(tasks, key=lambda task: task.bound_s):
        if task.bound_s >= least_s:
            break
        least_s = min(least_s, task.tight_s)
    for ratio in _NEAR:
        limit_s = ratio * least_s
        if 0 < limit_s < below_s:
            yield limit_s
    yield below_s


class _BySize(ABC):
    """Plans with slots of one of some sizes, under a limit of device memory."""

    def __init__(self, space: Space, family: Family, device_bytes: int) -> None:
        """Some plan of the family holds less than `device_bytes`."""
        self._space, self._family, self._device_bytes = space, family, device_bytes
        self._sizes = space.slot_sizes_within(family, device_bytes)
        self._bounds_s: dict[tuple[int, int], float] = {}

    @abstractmethod
    def best(self, below_s: float) -> Found | None:
        """Return the fastest plan that fits, or `None` if none is faster than `below_s`."""

    def task(self) -> Task:
        return Task(self.loose_bound_s(), self.best, self.bound_s)

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
    def __init__(
        self, space: Space, family: Family, partition_dp: PartitionDP, device_bytes: int
    ) -> None:
        super().__init__(space, family, device_bytes)
        self._partition_dp = partition_dp

    def best(self, below_s: float) -> Found | None:
        hopeful = set(self._hopeful(below_s))
        some = self._space.different(self._family, self._device_bytes) if hopeful else ()
        parts = [
            Task(self._partition_dp.bound_s(allowed), functools.partial(self._within, slot_bytes))
            for slot_bytes, allowed in some
            if slot_bytes in hopeful
        ]
        return fastest(parts, below_s)

    def _within(self, slot_bytes: int, below_s: float) -> Found | None:
        allowed = self._space.allowed(self._family, slot_bytes, self._device_bytes)
        return self._partition_dp.best(allowed, below_s)

    def _bound_of(self, sizes: Sequence[int]) -> float:
        allowed = self._space.allowed_of(self._family, sizes, self._device_bytes)
        return self._partition_dp.bound_s(allowed)


class Mixing(_BySize):
    def __init__(
        self, space: Space, family: Family, activation_dp: ActivationDP, device_bytes: int
    ) -> None:
        super().__init__(space, family, device_bytes)
        self._activation_dp = activation_dp

    def best(self, below_s: float, among: Collection[int] | None = None) -> Found | None:
        """Return the fastest plan that fits, or `None` if none is faster than `below_s`; `among`:
        sizes of slots that it may have."""
        return self._best(self._hopeful_of(among, below_s), below_s)

    def _best(self, sizes: Sequence[int], below_s: float) -> Found | None:
        found = self._at_once(sizes, below_s)
        if found is None or self._fits(found):
            return found
        middle = self._place_of(found, sizes)
        assert 0 < middle < len(sizes)
        best: Found | None = None
        for some in (sizes[:middle], sizes[middle:]):
            better = self._best(self._hopeful_of(some, below_s), below_s)
            if better is not None:
                best, below_s = better, better.step_s
        return best

    def narrowed(self, below_s: float) -> tuple[Found | None, list[int]]:
        """Return a plan that fits, and the sizes of slots with which one might be faster still, and
        faster than `below_s`. For a lean family, whose plans are not all plans of the space."""
        best: Found | None = None
        open_sizes: list[int] = []
        waiting = [self._hopeful(below_s)]
        while waiting:
            sizes = self._hopeful_of(waiting.pop(), below_s)
            found = self._at_once(sizes, below_s)
            if found is None:
                continue
            if self._fits(found):
                best, below_s = found, found.step_s
            elif len(sizes) == 1:
                open_sizes += sizes
            else:
                middle = max(1, min(self._place_of(found, sizes), len(sizes) - 1))
                waiting += [sizes[middle:], sizes[:middle]]
        return best, self._hopeful_of(open_sizes, below_s)

    def _hopeful_of(self, sizes: Collection[int] | None, below_s: float) -> list[int]:
        if sizes is not None and not sizes:
            return []
        hopeful = self._hopeful(below_s)
        return hopeful if sizes is None else sorted(set(hopeful) & set(sizes))

    def _at_once(self, sizes: Sequence[int], below_s: float) -> Found | None:
        """Return the fastest plan if a slot were as large as the largest of these sizes and took no
        more than the smallest; if it fits it is the best of them."""
        if not sizes:
            return None
        return self._activation_dp.best(
            self._activation_dp.budgets.budget(sizes, self._device_bytes), below_s
        )

    def _fits(self, found: Found) -> bool:
        return self._space.memory.device_bytes(found.shape) <= self._device_bytes

    def _place_of(self, found: Found, sizes: Sequence[int]) -> int:
        return bisect.bisect_left(sizes, self._space.memory.sizes(found.shape).slot_bytes)

    def _bound_of(self, sizes: Sequence[int]) -> float:
        return self._activation_dp.bound_s(
            self._activation_dp.budgets.budget(sizes, self._device_bytes)
        )


class Choice(NamedTuple):
    shape: Shape
    step_s: float
    device_bytes: int


def fastest_of(space: Space, device_bytes: int, below_s: float = np.inf) -> Choice | None:
    """Return a plan with the least predicted step time under a limit of device memory, or `None`
    if none is faster than `below_s`."""
    # Whatever is kept or offloaded, each layer computes what backward does of it.
    if sum(space.costing.layer_backward_s) >= below_s:
        return None
    groups = [_Group(space, group) for group in space.groups]
    tasks = [task for group in groups for task in group.tasks(device_bytes)]
    for limit_s in limits(tasks, below_s):
        found = fastest(tasks, limit_s)
        if found is not None:
            return Choice(found.shape, found.step_s, space.memory.device_bytes(found.shape))
    return None


class _Group:
    """Families that differ only in gradient buffers and in where values wait.

    They are searched at once, as if each had the speed of the fastest and the memory of the
    leanest: mostly no plan is as fast even so, or with few sizes of slots only. What is found so is
    the best of all if it fits, and otherwise each is searched.
    """

    def __init__(self, space: Space, families: Sequence[Family]) -> None:
        """`families` begin with the fastest."""
        offload = space.request.offload
        self._space = space
        self._each = [_Solvers(space, family, offload=offload) for family in families]
        self._all = self._each[0]
        if len(families) > 1:
            self._all = _Solvers(space, families[0]._replace(lean=True), offload=offload)

    def tasks(self, device_bytes: int) -> Iterator[Task]:
        if len(self._each) == 1:
            yield from self._all.tasks(device_bytes)
            return
        recomputing, mixing = self._all.recomputing(device_bytes), self._all.mixing(device_bytes)
        if recomputing is not None:
            best = functools.partial(self._best_recomputing, recomputing, device_bytes)
            yield dataclasses.replace(recomputing.task(), best=best)
        if mixing is not None:
            best = functools.partial(self._best_mixing, mixing, device_bytes)
            yield dataclasses.replace(mixing.task(), best=best)

    def _best_recomputing(
        self, at_once: Recomputing, device_bytes: int, below_s: float
    ) -> Found | None:
        found = at_once.best(below_s)
        if found is None or self._space.memory.device_bytes(found.shape) <= device_bytes:
            return found
        parts = [solvers.recomputing(device_bytes) for solvers in self._each]
        return fastest([part.task() for part in parts if part is not None], below_s)

    def _best_mixing(self, at_once: Mixing, device_bytes: int, below_s: float) -> Found | None:
        found, sizes = at_once.narrowed(below_s)
        if not sizes:
            return found
        if found is not None:
            below_s = found.step_s
        parts = [solvers.mixing(device_bytes) for solvers in self._each]
        tasks = [
            dataclasses.replace(part.task(), best=functools.partial(part.best, among=sizes))
            for part in parts
            if part is not None
        ]
        return fastest(tasks, below_s) or found


class _Solvers:
    def __init__(self, space: Space, family: Family, *, offload: bool) -> None:
        """`offload`: whether segments may be offloaded."""
        self._space, self._family, self._offload = space, family, offload

    # Made when the family is known to fit.
    @cached_property
    def _partition_dp(self) -> PartitionDP | None:
        if not (self._space.recomputes or self._family.whole):
            return None
        return PartitionDP(self._space.costing, self._family, self._space.request.segments)

    @cached_property
    def _activation_dp(self) -> ActivationDP | None:
        if not self._space.mixes or self._family.whole:
            return None
        return ActivationDP(self._space, self._family, offload=self._offload)

    def recomputing(self, device_bytes: int) -> Recomputing | None:
        if not self._space.fits(self._family, device_bytes) or self._partition_dp is None:
            return None
        return Recomputing(self._space, self._family, self._partition_dp, device_bytes)

    def mixing(self, device_bytes: int) -> Mixing | None:
        if not self._space.fits(self._family, device_bytes) or self._activation_dp is None:
            return None
        return Mixing(self._space, self._family, self._activation_dp, device_bytes)

    def tasks(self, device_bytes: int) -> Iterator[Task]:
        for part in (self.recomputing(device_bytes), self.mixing(device_bytes)):
            if part is not None:
                yield part.task()


def leanest_of(space: Space, fastest: Choice, limit_s: float, device_bytes: int) -> Choice:
    """Return the plan with the least device memory among those that take at most `limit_s`.

    Plans whose values wait on the device come first, then those that offload nothing: what goes
    through the host takes its memory bandwidth even where the prediction hides it. If the fastest
    plan is of the kind that comes first, the plan is as fast as that (`AS_FAST`).
    """
    best: Choice | None = None
    for rank in itertools.product(("device", "host"), (False, True)):
        boundary, offload = rank
        if offload and not space.request.offload:
            continue
        if rank_of(fastest.shape) == rank:
            best, limit_s = fastest, min(limit_s, (1 + AS_FAST) * fastest.step_s)
        # Those that hold least first: the others then end sooner.
        families = [family for family in space.families if family.boundary == boundary]
        for family in sorted(families, key=space.least_held):
            most = device_bytes if best is None else best.device_bytes - 1
            best = _leanest(space, family, most, limit_s, offload) or best
        if best is not None:
            return best
    return fastest


def rank_of(shape: Shape) -> tuple[str, bool]:
    """Return how much a shape sends through the host; less comes first."""
    return shape.boundary, "offload" in shape.activations


def _leanest(
    space: Space, family: Family, device_bytes: int, limit_s: float, offload: bool
) -> Choice | None:
    """Return the leanest plan of a family that takes at most `limit_s`, by bisection of memory.

    The limit is set to half of what is open, and then to just below the best plan found: mostly
    nothing is there, and the bisection is over.
    """
    below_s = float(np.nextafter(limit_s, np.inf))
    solvers = _Solvers(space, family, offload=offload)

    def within(limit_bytes: int) -> Choice | None:
        for task in solvers.tasks(limit_bytes):
            found = fastest([task], below_s)
            if found is not None:
                return Choice(found.shape, found.step_s, space.memory.device_bytes(found.shape))
        return None

    best = within(device_bytes)
    low = space.least_held(family)  # nothing is within less
    while best is not None and low < best.device_bytes:
        middle = (low + best.device_bytes) // 2
        for limit in (middle, best.device_bytes - 1):
            if low <= limit < best.device_bytes:
                better = within(limit)
                if better is None:
                    low = limit + 1
                else:
                    best = better
    return best
