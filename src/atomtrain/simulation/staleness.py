"""What a step would gain from parameters that are one update old: steps one after the other.

*Exact* training loads a segment for the next forward when its update is done. *Stale* training
would load the parameters of the step before, so that an update had a whole step: step `t` would
compute with what updates 0 to `t - 2` left. Since forward and backward of a step must see the same
parameters, and an update writes while they are read, it takes a second copy of them, which an
update has to bring up to date too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from atomtrain.planning.schedule import Visit
from atomtrain.planning.timeline import VisitTime
from atomtrain.planning.updating import ADAMW_BYTES

STALE_UPDATE = (ADAMW_BYTES + 8) / ADAMW_BYTES
"""How much longer an update takes that reads one float32 copy of the parameters, and writes
another: they are read and written once more."""
_STEPS = 12


class _Step(NamedTuple):
    """When things of one step were done."""

    computed_s: float
    updated_s: Mapping[int, float]
    """By layer."""


def steady_step_s(
    visits: Sequence[Visit], times: Sequence[VisitTime], *, clips: bool, stale: bool
) -> float:
    """Return the seconds from step to step once they follow each other evenly.

    Args:
        visits: Of a training step.
        times: The seconds of each visit.
        clips: Whether updates wait for the norm of all gradients; they then come in the order in
            which forward wants them.
        stale: Whether loads wait for the update before the last one only.
    """
    layers = range(min(v.layers[0] for v in visits), max(v.layers[1] for v in visits))
    before = last = _Step(0.0, dict.fromkeys(layers, 0.0))
    clock = _Clock()
    ends = []
    for _ in range(_STEPS):
        awaited = before if stale else last
        before, last = last, _step(visits, times, last.computed_s, awaited, clock, clips, stale)
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
    begins_s: float,
    awaited: _Step,
    clock: _Clock,
    clips: bool,
    stale: bool,
) -> _Step:
    compute = begins_s
    done: list[float] = []
    released: dict[int, float] = {}
    delivered: list[tuple[Visit, float]] = []
    updated: dict[int, float] = {}

    def update(visit: Visit, length_s: float, from_s: float) -> None:
        start, stop = visit.layers
        clock.update = max(clock.update, from_s)
        for layer in range(start, stop):
            clock.update += length_s * (STALE_UPDATE if stale else 1.0) / (stop - start)
            updated[layer] = clock.update

    for visit, time in zip(visits, times, strict=True):
        ready = 0.0
        if visit.load:
            free = done[visit.free_after] if visit.free_after >= 0 else begins_s
            fresh = max(awaited.updated_s[layer] for layer in range(*visit.layers))
            ready = clock.load = max(clock.load, free, fresh) + time.load_s
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
    for layer in awaited.updated_s:
        updated.setdefault(layer, 0.0)
    return _Step(compute, updated)
