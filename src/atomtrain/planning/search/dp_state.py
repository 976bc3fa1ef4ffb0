"""What decides the rest of a step at a cut of backward: six clocks, and how a visit moves them.

A later clock never makes a step end sooner, since every rule of the predictor is a maximum of sums.
So of two ways to the same cut, the one that is later (or equal) in every clock can be forgotten.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atomtrain.planning.cost.tables import VisitTable
from atomtrain.planning.cost.timeline import DiskWork
from atomtrain.planning.search.space import Family

Array = NDArray[np.float64]
Starts = NDArray[np.intp]

COMPUTE, LOAD, UNLOAD, BEFORE, UPDATE, FIRST = range(6)
"""When compute is free, when the next load may begin, when the last unload and the one before it
end, when updates are done, and when the first gradients were on the host, from where on a disk
works; seconds."""
CLOCKS = 6
SLACK = 1 + 1e-12
"""Bounds and times are the same sums in another order."""
_COMPARED = 32
"""Rows that are compared with each other at once."""
_AT_ONCE = 4
"""With how many rows all others are compared at once: most go with the first few."""
_EARLIER = np.triu(np.ones((_COMPARED, _COMPARED), bool), 1)
"""Which of the rows that are compared at once comes before which."""
_LESS = 1 - 1e-12
"""Sums in another order differ by less; they are no difference."""


class Lasting(NamedTuple):
    """Seconds of visits of backward: of one, or of several, `[n]` or with the shape of clocks."""

    visit_s: Any
    loading_s: Any
    unload_s: Any
    update_s: Any
    return_s: Any

    @classmethod
    def of(cls, table: VisitTable, start: int | Starts, stop: int) -> Lasting:
        """Return the seconds of segments that begin at one layer, or at several, and end at one."""
        return cls(*(getattr(table, name)[start, stop] for name in cls._fields))


class Clocks:
    def __init__(self, family: Family, disk: DiskWork | None, most_load_s: float = 0.0) -> None:
        """`disk`: what updates take where state is on disk. `most_load_s`: the longest load of any
        backward visit."""
        self._working_s = 0.0 if disk is None else disk.working_s
        self._last_s = 0.0 if disk is None else disk.last_s
        self._disk = disk
        self._overlap, self._single = family.slots > 1, family.gradient_buffers == 1
        self._most_load_s = most_load_s

    def after_turn(
        self, table: VisitTable, start: int | Starts, stop: int, starts_s: Array
    ) -> Array:
        """Return the clocks after turns, `[n, 6]`.

        Args:
            table: Seconds of turns.
            start: First layer of the turn, or of each of n.
            stop: The layer after its last one.
            starts_s: When it may start, `[n]`.
        """
        compute = starts_s + table.visit_s[start, stop]
        unload = compute + table.unload_s[start, stop]
        update = unload + table.update_s[start, stop]
        load = starts_s if self._overlap else compute
        clocks = [compute, load, unload, np.zeros_like(load), update, unload]
        return np.stack(clocks, axis=1)

    def after_visit(self, clocks: Array, lasting: Lasting) -> Array:
        """Return the clocks after a backward visit; `clocks` are `[n, 6]`, or `[n, 1, 6]` with
        several segments."""
        compute, load, unload, before, update, first = (clocks[..., i] for i in range(CLOCKS))
        ready = np.maximum(compute, load + lasting.loading_s)
        begin = np.maximum(ready, unload if self._single else before)
        end = begin + lasting.visit_s
        unloaded = np.maximum(unload, end) + lasting.unload_s
        updated = np.maximum(update, unloaded) + lasting.update_s
        link = np.where(lasting.return_s > 0, begin + lasting.return_s, ready)
        # A load that can start so early that it never holds compute up may as well start later.
        next_load = np.maximum(link, end - self._most_load_s) if self._overlap else end
        after = np.empty((*end.shape, CLOCKS))
        after[..., COMPUTE], after[..., LOAD] = end, next_load
        after[..., UNLOAD], after[..., UPDATE] = unloaded, updated
        # A disk that is done before compute holds nobody up.
        after[..., FIRST] = np.maximum(first, end - self._working_s) if self._disk else 0.0
        # An unload that is over before compute is free holds nobody up.
        after[..., BEFORE] = 0.0 if self._single else np.maximum(unload, end)
        return after

    def hopeful(self, clocks: Array, left_s: Any, below_s: float) -> NDArray[np.bool_]:
        """Return which labels can still end below a limit, with so much compute left at least."""
        ends = np.maximum(clocks[..., COMPUTE] + left_s, clocks[..., FIRST] + self._working_s)
        hopeful: NDArray[np.bool_] = ends <= below_s * SLACK
        return hopeful

    def ends(self, clocks: Array, begun_s: Array | float = 0.0) -> Array:
        """Return when steps end, `[n]`; `begun_s`: how long before the clocks' zero they began."""
        updated: Array = clocks[:, UPDATE]
        if self._disk is None:
            return updated
        # However early the first gradients are there, all is read within the step.
        read_s = 0.0 if self._disk.clips else self._disk.read_s
        working_s = np.maximum(clocks[:, FIRST] + self._working_s, read_s - begun_s)
        ends: Array = np.maximum(updated + self._last_s, working_s)
        return ends


def undominated(values: Array) -> list[int]:
    """Return the rows that no other one beats or equals in every column, `[n, k]`."""
    if len(values) == 1:
        return [0]
    less = np.where(values > 0, values * _LESS, values / _LESS)
    low = values.min(axis=0)
    differs = low < less.max(axis=0)
    if not differs.any():
        return [0]
    values, less, low = values[:, differs], less[:, differs], low[differs]
    # What beats a row has no larger sum of shares than it; what beats many tends to come early.
    left, kept = np.argsort(_shares(values, low).sum(axis=1), kind="stable"), list[int]()
    while left.size:
        # Some of the first in order are compared with each other, and all others with the best of
        # these.
        first, left = left[:_COMPARED], left[_COMPARED:]
        beaten = _beaten(values[first], less[first]) & _EARLIER[: first.size, : first.size]
        first = first[~beaten.any(axis=0)]
        kept += first.tolist()
        for some in range(0, first.size, _AT_ONCE):
            if not left.size:
                break
            left = left[~_beaten(values[left], less[first[some : some + _AT_ONCE]]).any(axis=0)]
    return kept


def _shares(values: Array, low: Array) -> Array:
    """Return how far rows are above the lowest of each column, as shares of its range."""
    shares: Array
    if np.isfinite(values).all():  # mostly, and sooner done
        shares = (values - low) / (values.max(axis=0) - low)
    else:
        with np.errstate(invalid="ignore"):
            shares = np.nan_to_num((values - low) / np.ptp(values, axis=0))
    return shares


def _beaten(values: Array, less: Array) -> NDArray[np.bool_]:
    beaten = np.ones((len(less), len(values)), bool)
    for column in range(values.shape[1]):
        beaten &= values[None, :, column] >= less[:, None, column]
    return beaten
