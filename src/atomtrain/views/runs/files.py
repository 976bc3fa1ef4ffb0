"""A run's files: what they are called, and the events that another process is still writing."""

from __future__ import annotations

import json
from pathlib import Path

from atomtrain.events import Event, is_deep

EVENTS_FILE = "events.jsonl"
"""Everything that happened."""
SWARM_FILE = "swarm.json"
"""What this peer knows of the others at present; replaced as a whole."""
PICTURE_FILE = "loss.png"
RECIPE_FILE = "recipe.yaml"
"""The options that the peer was last started with."""

_MOST_LINE_BYTES = 64 << 20
_NO_EVENT = b"["
"""Stands for the beginning of a line that is too long: however it ends, it is not an object."""


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
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            self.skipped += 1
            return None
        if isinstance(event, dict) and isinstance(event.get("event"), str) and not is_deep(event):
            return event
        self.skipped += 1
        return None
