"""Chooses among the plans of a space: the fastest, and the leanest of those about as fast.

Each family of plans is solved on its own (`partition_dp.py`, `activation_dp.py`); families are
tried by their bounds, so that most are never searched.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from atomtrain.planning.plan.shape import Shape
from atomtrain.planning.search.activation_dp import Mixed
from atomtrain.planning.search.partition_dp import Found, Optimum
from atomtrain.planning.search.slot_sizes import Mixing, Recomputing
from atomtrain.planning.search.space import Family, Space
from atomtrain.planning.search.tasks import Task, fastest, limits

AS_FAST = 0.002
"""Of plans that differ by less the leaner one is better. Less than what predictions miss by: of two
plans that compute alike one waits longer, whatever the profile. And memory that a plan leaves is of
little use, since the budget is the user's to give."""


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
    leanest: what is found so is the best of all if it fits, and otherwise each is searched.
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
        for part in (_Solvers.recomputing, _Solvers.mixing):
            task = part(self._all, device_bytes)
            if task is not None and len(self._each) > 1:
                best = functools.partial(self._best, part, task, device_bytes)
                task = dataclasses.replace(task, best=best)
            if task is not None:
                yield task

    def _best(
        self, part: _Part, all_at_once: Task, device_bytes: int, below_s: float
    ) -> Found | None:
        found = all_at_once.best(below_s)
        if found is None or self._space.memory.device_bytes(found.shape) <= device_bytes:
            return found
        tasks = [part(solvers, device_bytes) for solvers in self._each]
        return fastest([task for task in tasks if task is not None], below_s)


class _Solvers:
    def __init__(self, space: Space, family: Family, *, offload: bool) -> None:
        """`offload`: whether segments may be offloaded."""
        self._space, self._family, self._offload = space, family, offload

    # Made when the family is known to fit.
    @cached_property
    def _optimum(self) -> Optimum | None:
        if not (self._space.recomputes or self._family.whole):
            return None
        return Optimum(self._space.costing, self._family, self._space.request.segments)

    @cached_property
    def _mixed(self) -> Mixed | None:
        if not self._space.mixes or self._family.whole:
            return None
        return Mixed(self._space, self._family, offload=self._offload)

    def recomputing(self, device_bytes: int) -> Task | None:
        if not self._space.fits(self._family, device_bytes) or self._optimum is None:
            return None
        some = Recomputing(self._space, self._family, self._optimum, device_bytes)
        return Task(some.loose_bound_s(), some.best, some.bound_s)

    def mixing(self, device_bytes: int) -> Task | None:
        if not self._space.fits(self._family, device_bytes) or self._mixed is None:
            return None
        some = Mixing(self._space, self._family, self._mixed, device_bytes)
        best = some.loosest if self._family.lean else some.best
        return Task(some.loose_bound_s(), best, some.bound_s)

    def tasks(self, device_bytes: int) -> Iterator[Task]:
        for task in (self.recomputing(device_bytes), self.mixing(device_bytes)):
            if task is not None:
                yield task


_Part = Callable[[_Solvers, int], Task | None]
"""Gives a part of a family under a limit of device memory."""


def leanest_of(space: Space, fastest: Choice, limit_s: float, device_bytes: int) -> Choice:
    """Return the plan with the least device memory among those that take at most `limit_s`.

    Plans whose values wait on the device come first, then those that offload nothing: what goes
    through the host takes its memory bandwidth even where the prediction hides it. If the fastest
    plan is of the kind that comes first, the plan is as fast as that (`AS_FAST`).

    Args:
        space: The plans.
        fastest: The fastest one under the limit of memory.
        limit_s: The longest step.
        device_bytes: The limit of memory.
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
