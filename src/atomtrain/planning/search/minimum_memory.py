"""The least device memory with which some plan of the space works, however slow."""

from __future__ import annotations

import numpy as np

from atomtrain.errors import PlanError
from atomtrain.planning.plan.shape import Boundary
from atomtrain.planning.search.activation_budget import Rooms
from atomtrain.planning.search.space import Bytes, Family, Space, Work


def least_device_bytes(space: Space) -> int:
    """Return the least device bytes of any plan of the space.

    Raises:
        PlanError: there is none, because what all segments should do is not possible.
    """
    best, busy = np.inf, _Busy(space)
    # What comes early needs the same memory as what does not. Those that need least come first: by
    # what they find most of the others need not be looked at.
    families = [family for family in space.families if not family.early]
    families.sort(key=lambda family: space.least_held(family) + busy.least(family))
    if space.recomputes:
        for family in families:
            for slot_bytes in space.slot_sizes(family):
                held = space.held_bytes(family, slot_bytes)
                if held + busy.least(family) >= best:
                    break
                best = min(best, held + _least_work(space, family, slot_bytes))
    elif whole := [family for family in families if family.whole]:
        best = min(_whole_bytes(space, family) for family in whole)
    if space.mixes:
        for family in families:
            if not family.whole:
                best = _least_mixed(space, family, busy.least(family), best)
    if not np.isfinite(best):
        raise PlanError(
            f"no plan can have activations {space.request.activations!r} with so many segments: "
            "what some layer saves hides from autograd's hooks; leave activations to the planner "
            "(None)"
        )
    return int(best)


class _Busy:
    """What the busiest visit of any plan of a family needs at least, however large its slots."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._least: dict[tuple[Boundary, bool], int] = {}

    def least(self, family: Family) -> int:
        key = family.boundary, bool(family.on_device)
        if key not in self._least:
            self._least[key] = self._of(self._space.work(family))
        return self._least[key]

    def _of(self, work: Work) -> int:
        # Forward and backward may have partitions of their own.
        ahead, back = (
            _least_path(np.minimum(one, np.minimum(work.keep, work.offload)), None)
            for one in (work.forward, work.backward)
        )
        return int(np.maximum(work.turn, np.maximum(ahead, back))[:-1].min())


def _whole_bytes(space: Space, family: Family) -> float:
    (slot_bytes,) = space.slot_sizes(family)
    return space.held_bytes(family, slot_bytes) + _least_work(space, family, slot_bytes)


def _least_mixed(space: Space, family: Family, least: int, best: float) -> float:
    """Return the least device bytes of the plans that keep or offload, or `best` if that is less.

    Found by bisection: a plan that works within a limit works within a larger one. `least` is what
    any visit needs beside what is held.
    """
    if space.least_held(family) + least >= best:
        return best
    rooms = Rooms(space, family, offload=space.request.offload)
    for slot_bytes in space.slot_sizes(family):
        low = space.held_bytes(family, slot_bytes) + least - 1
        if low + 1 >= best:
            break
        high = best if np.isfinite(best) else rooms.most_bytes(slot_bytes)
        if not rooms.works(rooms.room([slot_bytes], int(high) - 1)):
            continue
        # Works below `high`, not below `low`.
        while high - low > 1:
            middle = (int(low) + int(high)) // 2
            if rooms.works(rooms.room([slot_bytes], middle)):
                high = middle
            else:
                low = middle
        best = min(best, high)
    return best


def _least_work(space: Space, family: Family, slot_bytes: int) -> float:
    work = space.work(family)
    sizes = space.costing.segment_bytes(frozenset(family.resident))
    fitting = sizes <= slot_bytes
    turn = np.where(fitting[:, -1], work.turn, np.inf)
    if family.whole:
        return float(turn[0])
    segments = space.request.segments
    forward = _least_path(np.where(fitting, work.forward, np.inf), None)
    below = None if segments is None else segments - 1
    backward = _least_path(np.where(fitting, work.backward, np.inf), below)
    busiest = np.maximum(turn, np.maximum(forward, backward))
    return float(busiest[1:-1].min(initial=np.inf))


def _least_path(work: Bytes, segments: int | None) -> Bytes:
    """Return the least work of the busiest segment of a partition of layers 0 to each cut.

    Args:
        work: Of each segment, `[start, stop]`; infinite where it is not allowed.
        segments: Their number, or `None` for any.
    """
    cuts = work.shape[0]
    least = np.full(cuts, np.inf)
    least[0] = 0
    if segments is None:
        for stop in range(1, cuts):
            least[stop] = np.maximum(least[:stop], work[:stop, stop]).min()
        return least
    for _ in range(segments):
        least = np.maximum(least[:, None], work).min(axis=0)
    return least
