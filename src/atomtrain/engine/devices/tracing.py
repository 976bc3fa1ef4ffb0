"""Measured spans: what every stream really did in a step, as plans predict it.

A job carries the record of the step that submitted it, so a step's spans are complete even though
its updates run on into the next step. Where nothing is recorded the cost is one comparison a job.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from atomtrain.planning.cost.timeline import Span, StreamName, label_of_layers
from atomtrain.planning.plan.shape import Layers, Phase


class Record:
    """The spans of one step. Streams add to it from their own threads.

    Times are seconds of `time.perf_counter`. This one times on the host, which is right for the
    emulated device and for host updates everywhere.
    """

    def __init__(self) -> None:
        self.label = ""
        """What compute does now: phase and layers of the visit."""
        # Appending to a list is atomic, so threads need no lock.
        self._entries: list[tuple[StreamName, str, Any, Any]] = []

    def host_now(self) -> Any:
        """Return the present moment of the calling thread."""
        return time.perf_counter()

    def device_now(self) -> Any:
        """Return the moment that the device's current stream reaches this point."""
        return self.host_now()

    def add(self, stream: StreamName, label: str, start: Any, end: Any) -> None:
        """Note that a stream was busy between two moments."""
        self._entries.append((stream, label, start, end))

    def spans(self) -> tuple[Span, ...]:
        """Return the spans by their start; call when the step's updates are done."""
        spans = [
            Span(stream, label, self._seconds(start), self._seconds(end))
            for stream, label, start, end in self._entries
        ]
        return tuple(sorted(spans, key=lambda span: (span.start_s, span.end_s)))

    def _seconds(self, moment: Any) -> float:
        """Return a moment in seconds; subclasses resolve a device's moments."""
        seconds: float = moment
        return seconds


@contextmanager
def recorded_visit(record: Record | None) -> Iterator[None]:
    """Note how long compute is busy with a visit, under the record's present label."""
    if record is None:
        yield
        return
    label, start = record.label, record.device_now()
    yield
    record.add("compute", label, start, record.device_now())


@contextmanager
def recorded_on_host(record: Record | None, layers: Layers) -> Iterator[None]:
    """Note how long the caller's thread is busy with forward of layers on the host."""
    if record is None:
        yield
        return
    start = record.host_now()
    yield
    record.add("update", label_of_layers(Phase.FORWARD, layers), start, record.host_now())
