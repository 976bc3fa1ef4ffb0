"""Room for what is kept: what a limit of memory leaves of it, reaches with it, and saves by it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atomtrain.planning.space import Bytes, Space

Array = NDArray[np.float64]


class Room(NamedTuple):
    """What each segment leaves of the device memory for kept graphs of segments below; negative
    where there is too little. `[start, stop]`."""

    recompute: Bytes
    keep: Bytes
    offload: Bytes
    """Without the window."""
    turn: Bytes
    """`[start]`."""


class Saving:
    """How much of forward need not be computed again, at best."""

    def __init__(self, space: Space, offload: bool) -> None:
        count, machine = space.memory.micro_batches, space.costing.machine
        forward_s = np.array(space.costing.layer_forward_s)
        n_bytes = np.array([float(count * n) for n in space.memory.saved.inner_bytes])
        # As if layers could be kept in part: those first that save most seconds a byte.
        order = np.argsort(n_bytes / np.maximum(forward_s, 1e-30))
        self._kept_bytes = np.concatenate(([0.0], np.cumsum(n_bytes[order])))
        self._kept_s = np.concatenate(([0.0], np.cumsum(forward_s[order])))
        busy = forward_s > 0
        density = float((n_bytes[busy] / forward_s[busy]).min(initial=np.inf))
        self._out_s = density / machine.unload_bytes_per_s if offload else np.inf
        self._in_s = density / machine.load_bytes_per_s if offload else np.inf

    def again_s(self, recomputed_s: Array, room: Array) -> Array:
        """Return how much of so much recomputing is left at least, without offloading, if the room
        for what is kept is so large."""
        again: Array = recomputed_s - np.interp(room, self._kept_bytes, self._kept_s)
        return np.maximum(again, 0.0)

    def least_s(self, ahead_s: Array, back_s: Array, again: Array) -> Array:
        """Return a time below which no step can be, with this much compute in forward below the
        turn, in all the rest, and in recomputing what is not offloaded."""
        least: Array = ahead_s + back_s + again
        if not np.isfinite(self._out_s):
            return least
        # What is offloaded saves seconds of compute and costs seconds of the link. The sum of both
        # ways is convex in it, so it is least where a way's bound changes, or at an end.
        covered = ahead_s / self._out_s if self._out_s else again
        balanced = (back_s + again) / (1 + self._in_s)
        for at in (covered, balanced, again):
            moved = np.clip(at, 0.0, again)
            forward = np.maximum(ahead_s, moved * self._out_s)
            backward = np.maximum(back_s + again - moved, moved * self._in_s)
            least = np.minimum(least, forward + backward)
        return least


class Reach:
    """Which cuts can be reached from the turn; first index: without and with the window."""

    def __init__(self, layers: int) -> None:
        self.keeping = np.full((2, layers + 1), -np.inf)
        """The most room while segments are kept; negative where they cannot be."""
        self.rest = np.zeros((2, layers + 1), bool)
        """Whether recomputed or offloaded segments lead there."""

    @property
    def done(self) -> bool:
        """Whether the first layer is reached."""
        return bool((self.keeping[:, 0] >= 0).any() or self.rest[:, 0].any())
