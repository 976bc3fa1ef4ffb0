"""Where views come from: the folders of a run, followed as its peers write to them.

Of each peer's events a view keeps what it needs, thinned out so that a long run stays small.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from atomtrain.errors import ConfigError
from atomtrain.events import Event, is_abandoned
from atomtrain.views.runs.files import EVENTS_FILE, SWARM_FILE, EventTail

_MOST_SWARM_BYTES = 64 << 20
_KILLED = "its process ended without a word"
_UNKNOWN = "unknown"
"""State of a peer that is elsewhere, when all that told of it have ended."""
MOST_STEPS = 2000
"""Step events kept at most, about; with more, every second one goes."""
_MOST_ROUNDS = 200
_MOST_MESSAGES = 100
_NEWEST = ("run_started", "plan", "timeline", "run_finished", "peer_lost")
"""Kinds of which the newest event is all that counts."""
_MESSAGES = ("membership", "checkpoint", "sample", "warning")


class Message(NamedTuple):
    """One piece of news for views."""

    kind: str
    """`events` or `swarm`."""
    body: dict[str, Any]
    """JSON values."""


class Source(Protocol):
    """What a view follows. Used by one thread at a time."""

    title: str
    """Name of what is followed."""

    def poll(self) -> list[Message]:
        """Return what is new since the last call; never waits."""

    def snapshot(self) -> list[Message]:
        """Return what a view needs to begin with."""


class FolderSource:
    """Follows a run's folder, or that of one peer."""

    def __init__(self, folder: Path) -> None:
        """Follow what is there, and what comes.

        Raises:
            ConfigError: it is no folder of a run or of a peer.
        """
        if not folder.is_dir():
            raise ConfigError(
                f"there is no folder {folder}; give that of a run, such as runs/mine, of a peer, "
                "such as runs/mine/peer-0, or the address of a peer"
            )
        self._folder = folder
        self._alone = (folder / EVENTS_FILE).exists()
        if not self._alone and not self._peer_folders():
            raise ConfigError(
                f"{folder} holds no run: there is no {EVENTS_FILE} in it or in a folder below it; "
                "give the folder of a run, such as runs/mine"
            )
        self.title = folder.absolute().name
        self._tails: dict[str, EventTail] = {}
        self.histories: dict[str, PeerHistory] = {}
        self._table = SwarmTable()
        self._stamps: dict[str, tuple[int, int]] = {}
        self._told: _Told | None = None
        self._own_ids: dict[str, str] = {}
        """Peers of this folder, by name: who they are in the swarm."""
        self._ended: dict[str, str] = {}

    def poll(self) -> list[Message]:
        """Return what is new since the last call; never waits."""
        messages = []
        newest = self._told
        for name, folder in self._peer_folders().items():
            if added := self._new_events(name, folder / EVENTS_FILE):
                history = self.histories.setdefault(name, PeerHistory())
                for event in added:
                    history.apply(event)
                messages.append(_events(name, added))
            self._poll_swarm(name, folder / SWARM_FILE)
        ended = {name: end for name, one in self.histories.items() if (end := one.ended)}
        if self._told is not None and (self._told is not newest or ended != self._ended):
            self._ended = ended
            messages += self._table.replace(self._rows(), self._told.time_s, self._told.by)
        return messages

    def snapshot(self) -> list[Message]:
        """Return what a view needs to begin with."""
        messages = [_events(name, history.events()) for name, history in self.histories.items()]
        return [*messages, *self._table.snapshot()]

    def _peer_folders(self) -> dict[str, Path]:
        if self._alone:
            return {self._folder.absolute().name: self._folder}
        return {
            path.parent.name: path.parent for path in sorted(self._folder.glob(f"*/{EVENTS_FILE}"))
        }

    def _new_events(self, name: str, path: Path) -> list[Event]:
        """Return what a peer has told since the last call, and that it is lost if it was killed."""
        tail = self._tails.setdefault(name, EventTail(path))
        history = self.histories.get(name)
        # Looked at before the file is read: what is read then is all that there will be.
        abandoned = history is not None and history.ended is None and is_abandoned(path)
        added = tail.read()
        if abandoned and not added:
            return [{"time_s": time.time(), "event": "peer_lost", "reason": _KILLED}]
        return added

    def _poll_swarm(self, name: str, path: Path) -> None:
        """Take in the table of peers that one peer sees, if it is new and the newest there is."""
        try:
            status = path.stat()
            stamp = (status.st_mtime_ns, status.st_size)
            if self._stamps.get(name) == stamp or status.st_size > _MOST_SWARM_BYTES:
                return
            self._stamps[name] = stamp
            table = json.loads(path.read_bytes())
            told = _Told(table["peers"], float(table["time_s"]), name)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return
        if not isinstance(told.rows, list):
            return
        told = told._replace(rows=[row for row in told.rows if isinstance(row, dict)])
        for row in told.rows:
            if row.get("is_self") is True:
                self._own_ids[name] = str(row.get("peer_id"))
        if self._told is None or told.time_s >= self._told.time_s:
            self._told = told

    def _rows(self) -> list[dict[str, Any]]:
        """Return what was told, with the states of now: who has ended tells of nobody any more."""
        assert self._told is not None
        ends = {self._own_ids.get(name): end for name, end in self._ended.items()}
        others = None if len(self._ended) < len(self.histories) else _UNKNOWN
        rows = []
        for row in self._told.rows:
            state = ends.get(str(row.get("peer_id")), others)
            rows.append(row if state is None else {**row, "state": state, "reachable": None})
        return rows


class _Told(NamedTuple):
    """What one peer of the folder wrote of the swarm."""

    rows: list[dict[str, Any]]
    time_s: float
    by: str


class SwarmTable:
    """One row a peer of the swarm; tells only rows that changed."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, Any]] = {}
        self._time_s = 0.0
        self._told_by = ""

    def replace(self, rows: Any, time_s: float, told_by: str) -> list[Message]:
        """Take in a whole table; an older one than the present is ignored."""
        if time_s < self._time_s or not isinstance(rows, list):
            return []
        self._time_s, self._told_by = time_s, told_by
        new = {
            str(row["peer_id"]): clean(row)
            for row in rows
            if isinstance(row, dict) and "peer_id" in row
        }
        changed = [row for key, row in new.items() if self._rows.get(key) != row]
        gone = [key for key in self._rows if key not in new]
        self._rows = new
        return [self._message(changed, gone)]

    def snapshot(self) -> list[Message]:
        """Return the whole table, if there is one."""
        return [self._message(list(self._rows.values()), [])] if self._rows else []

    def _message(self, rows: list[dict[str, Any]], gone: list[str]) -> Message:
        body = {"rows": rows, "gone": gone, "time_s": self._time_s, "told_by": self._told_by}
        return Message("swarm", body)


def _events(peer: str, events: list[Event]) -> Message:
    return Message("events", {"peer": peer, "events": clean(events)})


class PeerHistory:
    """The events of one peer that a view still needs, oldest first."""

    def __init__(self) -> None:
        self.steps: list[Event] = []
        self.evaluations: list[Event] = []
        self.rounds: deque[Event] = deque(maxlen=_MOST_ROUNDS)
        self.messages: deque[Event] = deque(maxlen=_MOST_MESSAGES)
        self.newest: dict[str, Event] = {}

    def apply(self, event: Event) -> None:
        """Take in one event; kinds that no view shows are dropped."""
        kind = event["event"]
        if kind == "step":
            # A peer that resumes repeats the steps after its checkpoint.
            _drop_from(self.steps, event)
            _drop_from(self.evaluations, event)
            self.steps.append(event)
            if len(self.steps) > 2 * MOST_STEPS:
                self.steps = self.steps[:-1:2] + self.steps[-1:]
        elif kind == "evaluation":
            _drop_from(self.evaluations, event)
            self.evaluations.append(event)
        elif kind == "round":
            self.rounds.append(event)
        elif kind in _MESSAGES:
            self.messages.append(event)
        elif kind in _NEWEST:
            if kind == "run_started":
                self.newest.pop("run_finished", None)
                self.newest.pop("peer_lost", None)
            self.newest[kind] = event

    @property
    def ended(self) -> str | None:
        """How the peer's run ended, such as `completed` or `lost`; `None` while it goes on."""
        if (end := self.newest.get("run_finished")) is not None:
            return str(end.get("reason", "finished"))
        return "lost" if "peer_lost" in self.newest else None

    def events(self) -> list[Event]:
        """Return the events from which a view can be made anew."""
        return [
            *self.newest.values(),
            *self.steps,
            *self.evaluations,
            *self.rounds,
            *self.messages,
        ]


def clean(value: Any) -> Any:
    """Return JSON values that browsers read: what is not finite becomes a text, such as `"nan"`."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    return value


def _drop_from(events: list[Event], new: Event) -> None:
    """Remove the events of the new one's step and of later ones."""
    step = new.get("step")
    if not isinstance(step, int):
        return
    while events and isinstance(last := events[-1].get("step"), int) and last >= step:
        events.pop()
