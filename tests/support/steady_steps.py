"""Steps laid out one after the other, apart from the planner, to hold its predictions against.

A segment is loaded for the next forward when its update is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from atomtrain.planning.cost.timeline import VisitTime
from atomtrain.planning.plan.shape import Visit

_STEPS = 12


class _Step(NamedTuple):
    """When things of one step were done."""

    computed_s: float
    updated_s: Mapping[int, float]
    """By layer."""
    released_s: Mapping[int, float]
    """By gradient buffer."""


def steady_step_s(visits: Sequence[Visit], times: Sequence[VisitTime], *, clips: bool) -> float:
    """Return the seconds from step to step once they follow each other evenly.

    Args:
        visits: Of a training step.
        times: The seconds of each visit.
        clips: Whether updates wait for the norm of all gradients; they then come in the order in
            which forward wants them.
    """
    layers = range(min(v.layers[0] for v in visits), max(v.layers[1] for v in visits))
    last = _Step(0.0, dict.fromkeys(layers, 0.0), {})
    clock = _Clock()
    ends = []
    for _ in range(_STEPS):
        last = _step(visits, times, last, clock, clips)
        ends.append(last.computed_s)
    half = _STEPS // 2
    return (ends[-1] - ends[-1 - half]) / half


class _Clock:
    """When each stream is free."""

    def __init__(self) -> None:
        self.load = self.unload = self.update = 0.0


def _step(
    visits: Sequence[Visit],
    times: Sequence[VisitTime],
    before: _Step,
    clock: _Clock,
    clips: bool,
) -> _Step:
    compute = begins_s = before.computed_s
    done: list[float] = []
    released = dict(before.released_s)
    delivered: list[tuple[Visit, float]] = []
    updated: dict[int, float] = {}

    def update(visit: Visit, length_s: float, from_s: float) -> None:
        start, stop = visit.layers
        clock.update = max(clock.update, from_s)
        for layer in range(start, stop):
            clock.update += length_s / (stop - start)
            updated[layer] = clock.update

    for visit, time in zip(visits, times, strict=True):
        ready = 0.0
        made_s = max(before.updated_s[layer] for layer in range(*visit.layers))
        if visit.load:
            free = done[visit.free_after] if visit.free_after >= 0 else begins_s
            ready = clock.load = max(clock.load, free, made_s) + time.load_s
        start = max(compute, ready)
        if visit.gradient is not None:
            start = max(start, released.get(visit.gradient, 0.0))
        compute = start + time.visit_s
        done.append(compute)
        if time.return_s > 0:
            clock.load = max(clock.load, start + time.return_s)
        if visit.gradient is not None:
            clock.unload = max(clock.unload, compute) + time.unload_s
            released[visit.gradient] = clock.unload
            if clips:
                delivered.append((visit, time.update_s))
            else:
                update(visit, time.update_s, clock.unload)
    for visit, length_s in sorted(delivered, key=lambda entry: entry[0].layers):
        update(visit, length_s, clock.unload)
    # Layers on the host, or what is not trained, is never waited for.
    for layer in before.updated_s:
        updated.setdefault(layer, 0.0)
    return _Step(compute, updated, released)
