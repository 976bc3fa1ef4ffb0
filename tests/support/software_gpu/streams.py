"""`torch.cuda.Stream` and `Event`, and which stream is current: one per thread and GPU."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from tests.support.software_gpu.order import NotEmulatedError, Task

if TYPE_CHECKING:
    from tests.support.software_gpu.runtime import SoftwareGpus


class Stream:
    """A stream of a GPU in software; none waits for the default one by itself, as in PyTorch."""

    gpus: ClassVar[SoftwareGpus]

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        if kwargs:
            raise NotEmulatedError(f"streams with {sorted(kwargs)}")
        self.device = torch.device("cuda", self.gpus.index_of(device))
        self.priority = priority
        self.queue = self.gpus.scheduler.queue(self.device.index)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        return self.gpus.scheduler.is_done(self.queue.last)

    def synchronize(self) -> None:
        self.gpus.blocks.collect()
        self.gpus.scheduler.finish(self.queue.last)


class Event:
    """An event; before it is recorded it is done."""

    gpus: ClassVar[SoftwareGpus]

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        if interprocess or external:
            raise NotEmulatedError("events of several processes, and of graphs")
        self._timed = enable_timing
        self._task: Task | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = self.gpus.current_stream() if stream is None else stream
        if self._task is not None and self._task.queue.device != stream.device.index:
            raise RuntimeError(
                f"Event device {self._task.queue.device} does not match recording stream's device "
                f"{stream.device.index}."
            )
        self.gpus.blocks.collect()
        self._task = self.gpus.scheduler.submit(stream.queue, None)

    def wait(self, stream: Stream | None = None) -> None:
        stream = self.gpus.current_stream() if stream is None else stream
        self.gpus.blocks.collect()
        if self._task is not None:
            self.gpus.scheduler.submit(stream.queue, None, after=self._task)

    def query(self) -> bool:
        self.gpus.blocks.collect()
        return self.gpus.scheduler.is_done(self._task)

    def synchronize(self) -> None:
        self.gpus.blocks.collect()
        self.gpus.scheduler.finish(self._task)

    def elapsed_time(self, end_event: Event) -> float:
        if not (self._timed and end_event._timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._task is None or end_event._task is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (self._task.done and end_event._task.done):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return end_event._task.done_ms - self._task.done_ms

    def ipc_handle(self) -> Any:
        raise NotEmulatedError("events of several processes")


class Current(threading.local):
    """What a thread has chosen; at first GPU 0 and the default streams."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Stream] = {}


class DeviceContext:
    """`torch.cuda.device`."""

    gpus: ClassVar[SoftwareGpus]

    def __init__(self, device: Any) -> None:
        self._index = self.gpus.index_of(device)
        self._before = 0

    def __enter__(self) -> None:
        self._before = self.gpus.current.device
        self.gpus.current.device = self._index

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        self.gpus.current.device = self._before


class StreamContext:
    """`torch.cuda.StreamContext`: chooses a stream, and its GPU with it."""

    gpus: ClassVar[SoftwareGpus]

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream
        self._before = (0, dict[int, Stream]())

    def __enter__(self) -> None:
        current = self.gpus.current
        self._before = current.device, dict(current.streams)
        if self._stream is not None:
            current.device = self._stream.device.index
            current.streams[current.device] = self._stream

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        self.gpus.current.device, self.gpus.current.streams = self._before
