"""The least device memory with which some plan of the space works, however slow."""

from __future__ import annotations

import numpy as np

from atomtrain.errors import PlanError
from atomtrain.planning.room import Rooms
from atomtrain.planning.space import Bytes, Family, Space


def least_device_bytes(space: Space) -> int:
    """Return the least device bytes of any plan of the space.

    Raises:
        PlanError: there is none, because what all segments should do is not possible.
    """
    best = np.inf
    # What comes early needs the same memory as what does not.
    families = [family for family in space.families if not family.early]
    if space.recomputes:
        for family in families:
            for slot_bytes in space.slot_sizes(family):
                held = space.held_bytes(family, slot_bytes)
                if held >= best:
                    break
                best = min(best, held + _least_work(space, family, slot_bytes))
    elif whole := [family for family in families if family.whole]:
        best = min(_whole_bytes(space, family) for family in whole)
    if space.mixes:
        for family in families:
            if not family.whole:
                best = _least_mixed(space, family, best)
    if not np.isfinite(best):
        raise PlanError(
            f"no plan can have activations {space.request.activations!r} with so many segments: "
            "what some layer saves hides from autograd's hooks; leave activations to the planner "
            "(None)"
        )
    return int(best)


def _whole_bytes(space: Space, family: Family) -> float:
    (slot_bytes,) = space.slot_sizes(family)
    return space.held_bytes(family, slot_bytes) + _least_work(space, family, slot_bytes)


def _least_mixed(space: Space, family: Family, best: float) -> float:
    """Return the least device bytes of the plans that keep or offload, or `best` if that is less.

    Found by bisection: a plan that works within a limit works within a larger one.
    """
    rooms = Rooms(space, family, offload=space.request.offload)
    for slot_bytes in space.slot_sizes(family):
        low = space.held_bytes(family, slot_bytes)
        if low >= best:
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
    """Return the least that the busiest visit needs beside slots of a given size."""
    work = space.work(family)
    sizes = space.costing.segment_bytes(frozenset(family.resident))
    fitting = np.triu(sizes <= slot_bytes, 1)
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
