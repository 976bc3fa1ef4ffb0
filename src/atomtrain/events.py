"""The event stream: one JSON object a line, the source of all displays and benchmarks."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

Event = dict[str, Any]
Listener = Callable[[Event], None]
SILENT_S = 10.0
"""How long nothing was added to a file whose writer has gone: copies of a folder have no writer."""


class EventLog:
    """Writes events to a file and to listeners, in the order in which they were emitted.

    Every event has `time_s` (Unix time), `event` (its kind) and the fields given to `emit`, whose
    names carry their units. Thread-safe. Listeners run on the emitting thread and must not block.
    While the log is open its file is locked (shared), so that `is_abandoned` tells a writer that
    was killed from one that is at work.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Append to `path`, or only tell the listeners if it is `None`."""
        self._file: TextIO | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
            with contextlib.suppress(OSError):  # a file system without locks
                # Waits for who looks whether there is a lock, which takes microseconds.
                fcntl.flock(self._file, fcntl.LOCK_SH)
            if _ends_in_mid_line(path):
                self._file.write("\n")  # so that the broken line costs only itself
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


def is_abandoned(path: Path) -> bool:
    """Return whether nobody on this machine has the log open, nor wrote to it of late.

    Never where the file system has no locks. Every event that was written is in the file by then.
    """
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return time.time() - os.fstat(file.fileno()).st_mtime > SILENT_S
    except OSError:
        return False


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events of a file; lines cut short or merged by a crash are skipped."""
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n") and (event := _parsed(line)) is not None:
                yield event


def is_deep(value: Any, levels: int = 16) -> bool:
    """Return whether JSON values lie deeper in each other than anything that ATOM writes.

    Whoever walks through such values by recursion could not, though a parser could.
    """
    within = [value]
    for _ in range(levels):
        within = [
            inner
            for outer in within
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if inner.__class__ in (dict, list)
        ]
        if not within:
            return False
    return True


def _parsed(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and "event" in event else None


def _ends_in_mid_line(path: Path) -> bool:
    with path.open("rb") as file:
        size_bytes = file.seek(0, 2)
        if size_bytes == 0:
            return False
        file.seek(size_bytes - 1)
        return file.read(1) != b"\n"
