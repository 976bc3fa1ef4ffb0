"""The event stream: one JSON object a line, the only source of displays, pictures and benchmarks."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

Event = dict[str, Any]
Listener = Callable[[Event], None]


class EventLog:
    """Writes events to a file and to listeners, in the order in which they were emitted.

    Every event has `time_s` (Unix time), `event` (its kind) and the fields given to `emit`, whose
    names carry their units. Thread-safe. Listeners run on the emitting thread and must not block.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Append to `path`, or only tell the listeners if it is `None`."""
        self._file: TextIO | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
        self._listeners: list[Listener] = []
        self._lock = threading.Lock()

    def subscribe(self, listener: Listener) -> None:
        """Call `listener` with each event from now on."""
        self._listeners.append(listener)

    def emit(self, kind: str, **fields: Any) -> None:
        """Record one event; `fields` must be JSON-serialisable."""
        event: Event = {"time_s": time.time(), "event": kind, **fields}
        with self._lock:
            if self._file is not None:
                self._file.write(json.dumps(event) + "\n")
                self._file.flush()
            for listener in self._listeners:
                listener(event)

    def close(self) -> None:
        """Close the file; later events reach listeners only."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events of a file; a last line cut short by a crash is skipped."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)
