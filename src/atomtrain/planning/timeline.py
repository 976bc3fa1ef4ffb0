"""Predicts one step: the visits laid out in time on the streams that the executor uses.

A step is counted from the start of its first load to the end of its last update. The next step
cannot begin sooner: the layers visited first in forward are the last ones in backward, so their
update is the last to be done, and the first load of the next step waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from atomtrain.planning.schedule import Visit

StreamName = Literal["compute", "load", "unload", "update", "fetch", "save"]


class VisitTime(NamedTuple):
    """Seconds that one visit takes on each stream, for all micro-batches of a step."""

    compute_s: float = 0.0
    load_s: float = 0.0
    """Parameters; counts only if the visit loads."""
    unload_s: float = 0.0
    """Gradients; counts only in the turn and in backward."""
    update_s: float = 0.0
    """The same."""
    fetch_s: float = 0.0
    """Values and their gradients, host to device."""
    save_s: float = 0.0
    """Values and their gradients, device to host."""

    @property
    def visit_s(self) -> float:
        """How long the visit lasts: values move while others are computed with."""
        return max(self.compute_s, self.fetch_s, self.save_s)


class Span(NamedTuple):
    """One piece of work on one stream."""

    stream: StreamName
    label: str
    """Phase and layers, such as `forward 3-5`."""
    start_s: float
    """Since the step began."""
    end_s: float


class StepTime(NamedTuple):
    """A predicted step, and the busy time of each resource in it."""

    step_s: float
    compute_s: float
    load_s: float
    """Parameters, values and gradients, host to device."""
    unload_s: float
    """The same, device to host."""
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


def predict(visits: Sequence[Visit], times: Sequence[VisitTime]) -> StepTime:
    """Return the step that the visits make, given the seconds of each of them."""
    busy = dict.fromkeys(("compute", "load", "unload", "update", "fetch", "save"), 0.0)
    end_s = 0.0
    for span in step_spans(visits, times):
        busy[span.stream] += span.end_s - span.start_s
        end_s = max(end_s, span.end_s)
    return StepTime(
        step_s=end_s,
        compute_s=busy["compute"],
        load_s=busy["load"] + busy["fetch"],
        unload_s=busy["unload"] + busy["save"],
        update_s=busy["update"],
    )


def step_spans(visits: Sequence[Visit], times: Sequence[VisitTime]) -> list[Span]:
    """Return the spans of the step, in the order of the visits; those of no length too.

    Args:
        visits: Of a training step.
        times: The seconds of each visit.
    """
    spans: list[Span] = []
    done: list[float] = []
    released: dict[int, float] = {}  # when each gradient buffer is empty again
    compute = load = unload = update = 0.0

    def add(stream: StreamName, visit: Visit, start_s: float, length_s: float) -> float:
        spans.append(Span(stream, label_of(visit), start_s, start_s + length_s))
        return start_s + length_s

    for visit, time in zip(visits, times, strict=True):
        ready = 0.0
        if visit.load:
            free = done[visit.free_after] if visit.free_after >= 0 else 0.0
            ready = load = add("load", visit, max(load, free), time.load_s)
        start = max(compute, ready)
        if visit.gradient is not None:
            start = max(start, released.get(visit.gradient, 0.0))
        for stream, length_s in (("fetch", time.fetch_s), ("save", time.save_s)):
            if length_s > 0:
                add(stream, visit, start, length_s)  # type: ignore[arg-type]
        add("compute", visit, start, time.compute_s)
        compute = start + time.visit_s
        done.append(compute)
        if visit.gradient is not None:
            unload = add("unload", visit, max(unload, compute), time.unload_s)
            released[visit.gradient] = unload
            update = add("update", visit, max(update, unload), time.update_s)
    return spans


def label_of(visit: Visit) -> str:
    """Return phase and layers of a visit, for people."""
    start, stop = visit.layers
    layers = str(start) if stop == start + 1 else f"{start}-{stop - 1}"
    return f"{visit.phase.value} {layers}"
