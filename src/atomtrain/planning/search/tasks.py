"""Parts of the space that are searched on their own, those that promise most first."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from atomtrain.planning.search.partition_dp import Found

_NEAR = (1.01, 1.04, 1.16, 1.64)
"""How far above the least that any plan could take plans are looked for, before all are."""


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
