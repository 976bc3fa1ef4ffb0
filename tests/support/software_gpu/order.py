"""Work that waits in streams, and which of it runs next.

Work is queued when the host asks for it and runs when somebody waits for it, or now and then. A
stream's work runs in order; streams run in any order that events allow, drawn at random.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

Clock = dict[int, int]
"""For each stream, by its number, how much of its work is known to come before."""


class NotEmulatedError(NotImplementedError):
    """The software GPU lacks this."""


@dataclass(eq=False)
class Task:
    """A piece of work in a queue."""

    queue: Queue
    run: Callable[[], None] | None
    """`None`: it only waits, or says how far the stream has come."""
    after: Task | None = None
    """Another stream's work that must be done before."""
    clock: Clock = field(default_factory=dict)
    """All that comes before it, itself included."""
    sleeps: int = 0
    """How often others may go first."""
    host: tuple[int, int] | None = None
    """The addresses of pinned memory that it uses, first and behind the last."""
    done: bool = False
    done_ms: float = 0.0


class Queue:
    """The work of one stream."""

    def __init__(self, number: int, device: int) -> None:
        self.number, self.device = number, device
        self.tasks: deque[Task] = deque()
        self.last: Task | None = None
        self.clock: Clock = {}

    def ready(self) -> bool:
        """Return whether the first piece of work may run."""
        if not self.tasks:
            return False
        after = self.tasks[0].after
        return after is None or after.done


class Scheduler:
    """Runs the work of all streams of all GPUs, one piece at a time.

    Attributes:
        lock: Held by whoever queues or runs work.
    """

    def __init__(self, seed: int) -> None:
        self.lock = threading.RLock()
        self._random = random.Random(seed)
        self._queues: list[Queue] = []
        self._host: Clock = {}
        """What the host has waited for: all that is queued later comes after it."""
        self._now_ms = 0.0
        self.error: BaseException | None = None
        """What an earlier piece of work raised; as in CUDA, nothing works after it."""

    def queue(self, device: int) -> Queue:
        """Return a new stream's queue."""
        with self.lock:
            self._queues.append(Queue(len(self._queues), device))
            return self._queues[-1]

    def submit(
        self,
        queue: Queue,
        run: Callable[[], None] | None,
        *,
        after: Task | None = None,
        sleeps: int = 0,
        host: tuple[int, int] | None = None,
    ) -> Task:
        """Queue a piece of work; now and then some of what waits runs."""
        with self.lock:
            task = Task(queue, run, after, sleeps=sleeps, host=host)
            join(queue.clock, self._host)
            if after is not None:
                join(queue.clock, after.clock)
            queue.clock[queue.number] = queue.clock.get(queue.number, 0) + 1
            task.clock = dict(queue.clock)
            queue.tasks.append(task)
            queue.last = task
            if self._random.random() < 0.05:
                self._run_some()
            return task

    def finish(self, task: Task | None) -> None:
        """Run work until this is done: only what it needs, all else before it, or anything."""
        with self.lock:
            self._check()
            if task is None:
                return
            mood = self._random.choice(("needed", "others", "any"))
            if mood == "others":
                while others := [q for q in self._queues if q is not task.queue and q.ready()]:
                    self._step(self._random.choice(others))
            while not task.done:
                ready = [queue for queue in self._queues if queue.ready()]
                self._step(self._random.choice(ready) if mood == "any" else _needed(task))
            join(self._host, task.clock)
            self._check()

    def is_done(self, task: Task | None) -> bool:
        """Return whether this is done, for whoever asks again and again: some work runs before."""
        with self.lock:
            self._check()
            if task is None:
                return True
            if self._random.random() < 0.5:
                self._run_some()
            if task.done:
                join(self._host, task.clock)
            return task.done

    def finish_host(self, low: int, high: int) -> bool:
        """Run what uses these addresses of pinned memory; return whether there was any."""
        with self.lock:
            if self.error is not None:
                return False  # nothing runs any more
            found = [
                task
                for queue in self._queues
                for task in queue.tasks
                if task.host is not None and task.host[0] < high and low < task.host[1]
            ]
            for task in found:
                self.finish(task)
            return bool(found)

    def finish_device(self, device: int) -> None:
        """Run all work of a GPU."""
        with self.lock:
            self._check()
            for queue in self._queues:
                if queue.device == device:
                    self.finish(queue.last)

    def wake(self) -> None:
        """End all sleep."""
        with self.lock:
            for queue in self._queues:
                for task in queue.tasks:
                    task.sleeps = 0

    def _run_some(self) -> None:
        for _ in range(self._random.randrange(20)):
            ready = [queue for queue in self._queues if queue.ready()]
            if not ready:
                return
            self._step(self._random.choice(ready))

    def _step(self, queue: Queue) -> None:
        task = queue.tasks[0]
        if task.sleeps:
            task.sleeps -= 1
            return
        queue.tasks.popleft()
        self._now_ms += 1.0
        try:
            if task.run is not None and self.error is None:
                with on_processor():
                    task.run()
        except BaseException as error:  # noqa: BLE001  whoever waits raises it
            self.error = error
        task.done, task.done_ms, task.run = True, self._now_ms, None

    def _check(self) -> None:
        if self.error is not None:
            raise RuntimeError(f"CUDA error: {self.error}") from self.error


@contextlib.contextmanager
def on_processor() -> Iterator[None]:
    """What is in here sees plain tensors only: no autograd, and nobody who watches operations."""
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        yield


def join(clock: Clock, other: Clock) -> None:
    """Add to `clock` what `other` knows."""
    for number, count in other.items():
        if count > clock.get(number, 0):
            clock[number] = count


def _needed(task: Task) -> Queue:
    """Return the stream whose first piece of work must run before this can."""
    head = task.queue.tasks[0]
    while head.after is not None and not head.after.done:
        head = head.after.queue.tasks[0]
    return head.queue
