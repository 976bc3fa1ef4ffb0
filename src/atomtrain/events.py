"""The event stream: one JSON object a line, the source of all displays and benchmarks."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from atomtrain import locks

Event = dict[str, Any]
Listener = Callable[[Event], None]
EVENTS_FILE = "events.jsonl"
"""Everything that happened to a peer."""
SWARM_FILE = "swarm.json"
"""What a peer knows of the others at present; replaced as a whole."""
PICTURE_FILE = "loss.png"
RECIPE_FILE = "recipe.yaml"
"""The options that a peer was last started with."""
_MOST_LINE_BYTES = 64 << 20
_NO_EVENT = b"["
"""Stands for the beginning of a line that is too long: however it ends, it is not an object."""
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
                locks.share(self._file)
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
            locks.take(file)
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


class EventTail:
    """Reads the events that were added to a file since the last call.

    A peer that is killed can leave half a line behind, and the same peer, started again, appends
    to it. Lines that are no events are therefore counted in `skipped`, never an error. Nor may what
    others have written stop who reads it: no line is longer, and no event deeper, than ATOM's own.
    """

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        """Start at the beginning of `path`, or behind what it holds now; it need not exist yet."""
        self._path = path
        self._rest = b""
        self._offset_bytes = path.stat().st_size if from_end and path.exists() else 0
        self.skipped = 0

    def read(self, most_bytes: int = -1) -> list[Event]:
        """Return the complete events added since the last call, oldest first; never waits.

        At most those of `most_bytes`, the others at the next calls; below 0: all.
        """
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._offset_bytes:  # started afresh by its writer
                    self._offset_bytes, self._rest = 0, b""
                file.seek(self._offset_bytes)
                added = file.read(most_bytes)
        except FileNotFoundError:
            return []
        self._offset_bytes += len(added)
        *lines, self._rest = (self._rest + added).split(b"\n")
        if len(self._rest) > _MOST_LINE_BYTES:
            self._rest = _NO_EVENT
        return [event for line in lines if (event := self._parse(line)) is not None]

    def _parse(self, line: bytes) -> Event | None:
        event = _parsed(line)
        if event is not None and isinstance(event["event"], str) and not is_deep(event):
            return event
        self.skipped += 1
        return None
