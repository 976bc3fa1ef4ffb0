"""Predicts one step: the visits laid out in time on the streams that the executor uses.

A step is counted from the start of its first load to the end of its last update. The next step
cannot begin sooner: the layers visited first in forward are the last ones in backward, so their
update is the last to be done, and the first load of the next step waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, get_args

from atomtrain.planning.plan.layout import STAGING_BUFFERS
from atomtrain.planning.plan.shape import Layers, Phase, Visit

StreamName = Literal["compute", "load", "unload", "update", "fetch", "save", "read", "write"]


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
    stage_s: float = 0.0
    """Parameters from disk for the load; counts only if the visit loads."""
    return_s: float = 0.0
    """Part of `fetch_s`: what was saved in forward and waited on the host. The link brings it
    before the parameters of the visit after."""
    later_s: float = 0.0
    """The host's updates that wait for the norm of all gradients, and go on in the next forward."""

    @property
    def visit_s(self) -> float:
        """How long the visit lasts: values move while others are computed with."""
        return max(self.compute_s, self.fetch_s, self.save_s)


class DiskWork(NamedTuple):
    """What updates of a step take, for all blocks together, where state is on disk, or where they
    wait for the norm of all gradients and go on in the next forward."""

    read_s: float
    update_s: float
    write_s: float
    ahead_s: float
    """How much of the reading there is memory for before anything is updated."""
    blocks: int
    """Parts that are read, updated and written one after the other."""
    clips: bool
    """Whether all that comes after the last gradient, so that the next forward waits for it."""

    @property
    def backlog_s(self) -> float:
        """How long the next forward has at least to wait for its last block."""
        return max(self.read_s, self.update_s, self.write_s) if self.clips else 0.0

    @property
    def working_s(self) -> float:
        """How long a step goes on at least after its first gradients are on the host."""
        if self.clips:
            return 0.0
        busiest_s = max(self.write_s, self.read_s - self.ahead_s)
        return busiest_s + (self.update_s + self.write_s) / max(1, self.blocks)

    @property
    def last_s(self) -> float:
        """How long the last block is written after its update."""
        return 0.0 if self.clips else self.write_s / max(1, self.blocks)


class Span(NamedTuple):
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
    disk_s: float
    """The busier of reading and writing."""

    @property
    def bound(self) -> str:
        busy = {
            "compute": self.compute_s,
            "link (host to device)": self.load_s,
            "link (device to host)": self.unload_s,
            "host optimizer": self.update_s,
            "disk": self.disk_s,
        }
        return max(busy, key=lambda name: busy[name])


def step_time(spans: Iterable[Span]) -> StepTime:
    """Return the step that these spans make."""
    busy = dict.fromkeys(get_args(StreamName), 0.0)
    end_s = 0.0
    for span in spans:
        busy[span.stream] += span.end_s - span.start_s
        end_s = max(end_s, span.end_s)
    return StepTime(
        step_s=end_s,
        compute_s=busy["compute"],
        load_s=busy["load"] + busy["fetch"],
        unload_s=busy["unload"] + busy["save"],
        update_s=busy["update"],
        disk_s=max(busy["read"], busy["write"]),
    )


def step_spans(
    visits: Sequence[Visit],
    times: Sequence[VisitTime],
    disk: DiskWork | None = None,
    *,
    spends: bool = False,
) -> list[Span]:
    """Return the spans of the step, in the order of the visits; those of no length too.

    Args:
        visits: Of a training step.
        times: The seconds of each visit.
        disk: What updates take where they go on in the next forward, or state is on disk.
        spends: Whether gradients share staging buffers on the host (`planning/plan/layout.py`).
    """
    clips = disk is not None and disk.clips
    streams = Streams(updates=not clips, spends=spends)
    first_s = 0.0
    for visit, time in zip(visits, times, strict=True):
        begin_s = 0.0
        if visit.phase is Phase.TURN and disk is not None and clips:
            begin_s = disk.backlog_s
            streams.add("read", visit, 0.0, disk.read_s)
            streams.add("write", visit, 0.0, disk.write_s)
            updated = 0.0  # what the step before left, in forward's order
            for one, lasting in reversed(list(zip(visits, times, strict=True))):
                if one.gradient is not None:
                    updated = streams.add("update", one, updated, lasting.later_s)
        streams.lay(visit, time, begin_s=begin_s)
        if visit.phase is Phase.TURN:
            first_s = streams.unload_s
    if disk is not None and not clips:
        ends = max(streams.update_s + disk.last_s, first_s + disk.working_s)
        streams.add("read", visits[-1], max(0.0, first_s - disk.ahead_s), disk.read_s)
        streams.add("write", visits[-1], ends - disk.write_s, disk.write_s)
    return streams.spans


class Streams:
    """Lays visits out in time, one after the other: when each stream is free."""

    def __init__(self, *, updates: bool = True, spends: bool = False) -> None:
        """`updates`: whether updates follow their gradients. `spends`: whether these share staging
        buffers on the host."""
        self._updates, self._spends = updates, spends
        self._spent_s = [0.0] * STAGING_BUFFERS  # when what was in each has been used
        self._staging = 0
        self.spans: list[Span] = []
        self.compute_s = self.load_s = self.unload_s = self.update_s = 0.0
        """When each is done with all that was laid out."""
        self._ends_s: list[float] = []  # of the visits so far
        self._released: dict[int, float] = {}  # when each gradient buffer is empty again

    def add(self, stream: StreamName, visit: Visit, start_s: float, length_s: float) -> float:
        """Add a span; return its end."""
        self.spans.append(Span(stream, label_of(visit), start_s, start_s + length_s))
        return start_s + length_s

    def lay(self, visit: Visit, time: VisitTime, *, begin_s: float = 0.0) -> None:
        """Lay out a step's next visit."""
        ready = 0.0
        if visit.load:
            free = self._ends_s[visit.free_after] if visit.free_after >= 0 else 0.0
            # What is on disk is read and loaded piece by piece: the slower of both counts.
            begun = max(self.load_s, free) + max(0.0, time.stage_s - time.load_s)
            ready = self.load_s = self.add("load", visit, begun, time.load_s)
        start = max(self.compute_s, ready, begin_s)
        if visit.gradient is not None:
            start = max(start, self._released.get(visit.gradient, 0.0))
        for stream, length_s in (("fetch", time.fetch_s), ("save", time.save_s)):
            if length_s > 0:
                self.add(stream, visit, start, length_s)  # type: ignore[arg-type]
        self.add("compute", visit, start, time.compute_s)
        self.compute_s = start + time.visit_s
        self._ends_s.append(self.compute_s)
        if time.return_s > 0:
            self.load_s = max(self.load_s, start + time.return_s)
        if visit.gradient is not None:
            self._leave(visit, time)
            self._released[visit.gradient] = self.unload_s

    def _leave(self, visit: Visit, time: VisitTime) -> None:
        """Lay out what comes after a visit: its gradients leave and are updated."""
        staging_s = 0.0
        if self._spends:
            self._staging = (
                0 if visit.phase is Phase.TURN else (self._staging + 1) % STAGING_BUFFERS
            )
            staging_s = self._spent_s[self._staging]
        begun = max(self.unload_s, self.compute_s, staging_s)
        self.unload_s = self.add("unload", visit, begun, time.unload_s)
        if self._updates:
            begun = max(self.update_s, self.unload_s)
            self.update_s = self.add("update", visit, begun, time.update_s)
        self._spent_s[self._staging] = self.update_s


def label_of(visit: Visit) -> str:
    return label_of_layers(visit.phase, visit.layers)


def label_of_layers(phase: Phase, layers: Layers) -> str:
    start, stop = layers
    return f"{phase.value} {start if stop == start + 1 else f'{start}-{stop - 1}'}"
