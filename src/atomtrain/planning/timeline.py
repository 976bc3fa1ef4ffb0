"""Predicts one step: the visits laid out in time on the streams that the executor uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from atomtrain.planning.schedule import Phase, Visit


class SegmentTime(NamedTuple):
    """Seconds for one segment and all micro-batches of a step."""

    forward_s: float
    """Without a graph."""
    backward_s: float
    """Recompute and backward."""
    load_s: float
    unload_s: float
    update_s: float
    save_s: float
    """Values at the segment's lower cut, device to host, in forward."""
    fetch_s: float
    """The same back, in backward."""


class StepTime(NamedTuple):
    """A predicted step, and the busy time of each resource in it."""

    step_s: float
    compute_s: float
    load_s: float
    unload_s: float
    update_s: float

    @property
    def bound(self) -> str:
        """The busiest resource."""
        busy = {
            "compute": self.compute_s,
            "link (host to device)": self.load_s,
            "link (device to host)": self.unload_s,
            "host optimizer": self.update_s,
        }
        return max(busy, key=lambda name: busy[name])


def predict(visits: Sequence[Visit], times: Sequence[SegmentTime]) -> StepTime:
    """Return the steady-state step: the second of two, so that overlap between steps counts."""
    ready = [0.0] * len(times)  # when each segment's update is done
    clocks = _Clocks()
    first_s = _one_step(visits, times, ready, clocks)
    end_s = _one_step(visits, times, ready, clocks)
    compute_s = sum(_compute_s(visit, times[visit.segment]) for visit in visits)
    loads = [times[visit.segment] for visit in visits if visit.load]
    backward = [times[visit.segment] for visit in visits if visit.gradient is not None]
    return StepTime(
        step_s=end_s - first_s,
        compute_s=compute_s,
        load_s=sum(t.load_s for t in loads) + sum(t.fetch_s for t in backward),
        unload_s=sum(t.unload_s + t.save_s for t in backward),
        update_s=sum(t.update_s for t in times),
    )


class _Clocks:
    """When each stream is free again."""

    compute = load = unload = update = 0.0


def _one_step(
    visits: Sequence[Visit], times: Sequence[SegmentTime], ready: list[float], clocks: _Clocks
) -> float:
    done: list[float] = []
    buffers: dict[int, float] = {}
    for visit in visits:
        time = times[visit.segment]
        loaded = 0.0
        if visit.load:
            free = done[visit.free_after] if visit.free_after >= 0 else 0.0
            clocks.load = max(clocks.load, free, ready[visit.segment]) + time.load_s
            loaded = clocks.load
        start = max(clocks.compute, loaded)
        if visit.gradient is not None:
            start = max(start, buffers.get(visit.gradient, 0.0))
        compute_s = _compute_s(visit, time)
        moved_s = time.save_s if visit.phase is Phase.FORWARD else time.fetch_s
        clocks.compute = start + max(compute_s, moved_s)
        done.append(clocks.compute)
        if visit.gradient is not None:
            clocks.unload = max(clocks.unload, clocks.compute) + time.unload_s
            buffers[visit.gradient] = clocks.unload
            clocks.update = max(clocks.update, clocks.unload) + time.update_s
            ready[visit.segment] = clocks.update
    return clocks.compute


def _compute_s(visit: Visit, time: SegmentTime) -> float:
    return time.backward_s if visit.gradient is not None else time.forward_s
