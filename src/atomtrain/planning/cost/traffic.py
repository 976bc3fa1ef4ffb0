"""Bytes and updates of visits to all segments at once: what is loaded, unloaded, and where updated.

All are sums over layers (and what shared weights add), so each is a table `[start, stop]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atomtrain.planning.plan.layout import Layout
from atomtrain.planning.plan.updating import BlockUpdate

Array = NDArray[np.float64]
_NONE: frozenset[int] = frozenset()


class Moved(NamedTuple):
    """Sums over segments, `[start, stop]`."""

    segment: Array
    """Bytes in a slot."""
    coming: Array
    """Bytes of resident blocks that come from the host."""
    gradient: Array
    """Bytes in a gradient buffer."""
    leaving: Array
    """Bytes of the gradients of resident blocks that leave."""
    updated: Array
    """What the host updates, in AdamW parameters."""
    updated_there: Array
    """What the device updates, in its AdamW parameters."""
    seeds: Array
    """Bytes of gradients that come back to be added to."""


class Traffic:
    """Answers what visits move, by what is resident."""

    def __init__(self, layout: Layout, updated: Sequence[BlockUpdate], host_layers: int) -> None:
        """`updated`: what updating each block takes."""
        self._layout, self._updated, self._first = layout, updated, host_layers
        self._moved: dict[tuple[frozenset[int], frozenset[int], frozenset[int]], Moved] = {}
        self._largest: dict[frozenset[int], tuple[Array, Array]] = {}

    def moved(
        self,
        resident: frozenset[int],
        on_device: frozenset[int] = _NONE,
        early: frozenset[int] = _NONE,
    ) -> Moved:
        """Return what visits to all segments load, unload and update."""
        key = resident, on_device, early
        if key not in self._moved:
            layout, count = self._layout, len(self._layout.layers)
            updates = self._updated[:count]
            here = [0.0 if b in on_device else u.host_work for b, u in enumerate(updates)]
            there = [u.device_work if b in on_device else 0.0 for b, u in enumerate(updates)]
            own = [layout.block_bytes(block) for block in range(count)]
            gradients = [layout.gradients.block_bytes(block) for block in range(count)]
            leaves = [block in resident and block not in on_device for block in range(count)]
            comes = [leaves[block] and block not in early for block in range(count)]
            moved = Moved(
                segment=between([n * (block not in resident) for block, n in enumerate(own)]),
                coming=between([n * comes[block] for block, n in enumerate(own)]),
                gradient=between([n * (b not in resident) for b, n in enumerate(gradients)]),
                leaving=between([n * leaves[block] for block, n in enumerate(gradients)]),
                updated=between(here),
                updated_there=between(there),
                seeds=np.zeros((count + 1, count + 1)),
            )
            for block in range(count, layout.blocks):
                moved = self._with_shared(moved, block, resident, on_device, early)
            for block in early:
                moved = moved._replace(coming=moved.coming + self._pieces(block))
            self._moved[key] = moved
        return self._moved[key]

    def _pieces(self, block: int) -> Array:
        """Return how many bytes of an early block come with each segment in forward."""
        ranges = (
            self._layout.early_range(block, layer, layer + 1, self._first)
            for layer in range(len(self._layout.layers))
        )
        return between([stop - start for start, stop in ranges])

    def _with_shared(
        self,
        moved: Moved,
        block: int,
        resident: frozenset[int],
        on_device: frozenset[int],
        early: frozenset[int],
    ) -> Moved:
        """Return the sums with what a shared weight adds to them."""
        users, n_bytes = self._layout.users(block, self._first), self._layout.block_bytes(block)
        gradient_bytes = self._layout.gradients.block_bytes(block)
        if not users:
            return moved
        start, stop = np.indices(moved.segment.shape)
        used = np.zeros(moved.segment.shape, bool)
        for user in users:
            used |= (start <= user) & (user < stop)
        first = (start <= users[0]) & (users[0] < stop)
        work = self._updated[block]
        if block in on_device:
            return moved._replace(updated_there=moved.updated_there + work.device_work * first)
        moved = moved._replace(updated=moved.updated + work.host_work * first)
        if block in resident:
            return moved._replace(
                coming=moved.coming + n_bytes * first * (block not in early),
                leaving=moved.leaving + gradient_bytes * first,
            )
        return moved._replace(
            segment=moved.segment + n_bytes * used,
            gradient=moved.gradient + gradient_bytes * used,
            seeds=moved.seeds + gradient_bytes * (used & (users[-1] >= stop)),
        )

    def most_gradient_bytes(self, resident: frozenset[int], slot_bytes: int) -> int:
        """Return the largest gradients of the segments that fit a slot."""
        wide = self._layout.gradient_factor
        if self._layout.gradients is self._layout:
            return wide * slot_bytes
        sizes, largest = self._largest_gradients(resident)
        fitting = int(np.searchsorted(sizes, slot_bytes, side="right"))
        return wide * int(largest[fitting - 1]) if fitting else 0

    def _largest_gradients(self, resident: frozenset[int]) -> tuple[Array, Array]:
        """Return all segments' bytes in increasing order, and the largest gradient up to each."""
        if resident not in self._largest:
            moved = self.moved(resident)
            start, stop = np.triu_indices(len(moved.segment), 1)
            sizes = moved.segment[start, stop]
            order = np.argsort(sizes)
            largest = np.maximum.accumulate(moved.gradient[start, stop][order])
            self._largest[resident] = sizes[order], largest
        return self._largest[resident]


def between(values: Sequence[float]) -> Array:
    """Return the sums of `values[start:stop]`, 0 where `stop` is not above `start`."""
    sums = np.concatenate(([0.0], np.cumsum(np.asarray(values, float))))
    between: Array = np.triu(sums[None, :] - sums[:, None])
    return between
