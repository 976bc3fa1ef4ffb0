"""Streams: threads that run jobs in order, and events that say when a job is done.

A `Record` has measured spans: what every stream really did in a step, as plans predict it. A job
carries the record of the step that submitted it, so a step's spans are complete even though its
updates run on into the next step. Where nothing is recorded the cost is one comparison a job.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from atomtrain.errors import StreamError
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


DEADLINE_S = 1800.0
"""Longest that anybody waits for one transfer or host update. It only turns a hang into an error:
the largest single job (a segment of many GB through a slow link) takes seconds."""

Job = Callable[[], None]
Inject = Callable[[str], None]
"""Called with a stream's name before each of its jobs; tests sleep or raise here."""


class Event:
    """Set once, when a job is done or has failed.

    A lock that is held until then: what `threading.Event` is made of takes several times as long to
    make, and a step that offloads activations makes a thousand.
    """

    def __init__(self) -> None:
        self._done = False
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._lock.acquire()

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the job as done, or as failed with `error`; at most once."""
        self._error = error
        self._done = True
        self._lock.release()

    def wait(self) -> None:
        """Block the calling thread until the job is done.

        Raises:
            StreamError: the job failed, or did not finish by the deadline.
        """
        if not self._done:
            if not self._lock.acquire(timeout=DEADLINE_S):
                raise StreamError(
                    f"a transfer or host update did not finish within {DEADLINE_S:g} s"
                )
            self._lock.release()  # for others that wait
        if self._error is not None:
            if isinstance(self._error, StreamError):
                raise self._error
            raise StreamError(f"a transfer or host update failed: {self._error}") from self._error

    def is_done(self) -> bool:
        """Return whether `wait` would return (or raise) at once."""
        return self._done


def finished() -> Event:
    """Return an event that is already set, always the same one."""
    return _FINISHED


_FINISHED = Event()
_FINISHED.finish()

_Item = tuple[Job, Sequence[Event], Event]
"""A job, the events that it starts after, and its own."""


class Stream:
    """Runs jobs on a thread of its own, one after the other, in the order of submission.

    A job that fails makes its event raise, and with it every job that depends on it; the stream
    itself goes on.
    """

    record: Record | None = None
    """Where the spans of the jobs submitted from now on are noted, or `None`."""

    def __init__(self, name: str, inject: Inject | None = None) -> None:
        self.name = name
        self._inject = inject
        self._jobs: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=f"atom-{name}", daemon=True)
        self._thread.start()

    def submit(self, job: Job, after: Sequence[Event] = (), label: str | None = None) -> Event:
        """Queue a job that starts when all events in `after` are done; return its event.

        `label` names it in traces; `None` is what compute does while it is submitted.
        """
        item = self._item(job, after, label)
        self._jobs.put(item)
        return item[2]

    def close(self) -> None:
        """Finish the queued jobs, then end the thread."""
        self._jobs.put(None)
        self._thread.join(DEADLINE_S)

    def _item(self, job: Job, after: Sequence[Event], label: str | None) -> _Item:
        """Return a job with a new event; it notes when it ran if there is a record."""
        event = self._new_event()
        if self.record is not None:
            job = self._recorded(job, label or self.record.label, self.record)
        return job, after, event

    def _new_event(self) -> Event:
        return Event()

    def _recorded(self, job: Job, label: str, record: Record) -> Job:
        """Return a job that also notes when it ran."""

        def recorded() -> None:
            start = self._now(record)
            job()
            record.add(cast(StreamName, self.name), label, start, self._now(record))

        return recorded

    def _now(self, record: Record) -> Any:
        """Return the present moment; subclasses ask the device stream."""
        return record.host_now()

    def _run(self, job: Job, after: Sequence[Event], event: Event) -> None:
        """Do one job, whose event finishes after it; subclasses order it on a device stream instead
        of waiting."""
        for earlier in after:
            earlier.wait()
        if self._inject is not None:
            self._inject(self.name)
        job()

    def _loop(self) -> None:
        while (item := self._jobs.get()) is not None:
            event = item[2]
            failed: BaseException | None = None
            try:
                self._run(*item)
            except StreamError as error:
                # An earlier job's. A traceback through this one would keep its tensors alive.
                failed = error.with_traceback(None)
            except BaseException as error:  # noqa: BLE001  the waiting thread raises it
                failed = error
            # The job may hold the last reference to a device tensor, and whoever waits for its
            # event counts on that memory.
            del item
            event.finish(failed)
            del event, failed


class EagerStream(Stream):
    """A stream whose jobs the caller does himself, unless they have to wait for something.

    For compute that has all cores already: a thread beside it takes them from operations whose own
    threads then wait for each other. The order of jobs stays that of submission.
    """

    def __init__(self, name: str, inject: Inject | None = None) -> None:
        super().__init__(name, inject)
        self._last = finished()

    def submit(self, job: Job, after: Sequence[Event] = (), label: str | None = None) -> Event:
        """Do a job now if all before it and all events in `after` are done, else queue it."""
        if not (self._last.is_done() and all(event.is_done() for event in after)):
            self._last = super().submit(job, after, label)
            return self._last
        item = self._item(job, after, label)
        event = item[2]
        try:
            self._run(*item)
        except StreamError as error:
            event.finish(error.with_traceback(None))  # see `_loop`
        except Exception as error:  # noqa: BLE001  whoever waits for the event raises it
            event.finish(error)
        except BaseException as error:  # an interrupt is the caller's
            event.finish(error)
            raise
        else:
            event.finish()
        return event


class Wait:
    """Waits of a computing thread that is the host's own, and how long they took."""

    def __init__(self, inject: Inject | None = None) -> None:
        self._inject = inject
        self._wait_s = 0.0

    def hold(self, event: Event) -> None:
        """Block until the event is done; raises what its job raised."""
        if self._inject is not None:
            self._inject("compute")
        if event.is_done():
            event.wait()
            return
        started_s = time.perf_counter()
        event.wait()
        self._wait_s += time.perf_counter() - started_s

    def take_s(self) -> float:
        """Return the seconds waited since the last call."""
        wait_s, self._wait_s = self._wait_s, 0.0
        return wait_s
