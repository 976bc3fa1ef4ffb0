"""Where views come from: the folders of runs, followed as their peers write to them.

A long file is read piece by piece, so that a page of long runs is there at once and fills.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from atomtrain.errors import ConfigError
from atomtrain.events import EVENTS_FILE, SWARM_FILE, Event, EventTail, is_abandoned, is_deep
from atomtrain.views.dashboard.history import PeerHistory

_MOST_SWARM_BYTES = 64 << 20
_KILLED = "its process ended without a word"
_UNKNOWN = "unknown"
"""State of a peer that is elsewhere, when all that told of it have ended."""
_MOST_READ_BYTES = 4 << 20
"""Of a peer's events at a time."""


class Message(NamedTuple):
    """One piece of news for views."""

    kind: str
    """`events`, `curves` or `swarm`."""
    body: dict[str, Any]
    """JSON values; `run` says of which run."""


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
            ConfigError: it is not a folder of a run or of a peer.
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
        messages = []
        newest = self._told
        for name, folder in self._peer_folders().items():
            if added := self._new_events(name, folder / EVENTS_FILE):
                history = self.histories.setdefault(name, PeerHistory())
                messages += self._apply(name, history, added)
            self._poll_swarm(name, folder / SWARM_FILE)
        ended = {name: end for name, one in self.histories.items() if (end := one.ended)}
        if self._told is not None and (self._told is not newest or ended != self._ended):
            self._ended = ended
            told = self._table.replace(self._rows(), self._told.time_s, self._told.by)
            messages += map(self._of_run, told)
        return messages

    def snapshot(self) -> list[Message]:
        messages = []
        for name, history in self.histories.items():
            messages.append(self._about(name, "events", {"events": clean(history.events())}))
            messages += [self._about(name, "curves", body) for body in history.bodies()]
        return [*messages, *map(self._of_run, self._table.snapshot())]

    def _apply(self, name: str, history: PeerHistory, added: list[Event]) -> list[Message]:
        """Take in a peer's new events; return the news: of steps the last is enough."""
        shown = [event for event in added if history.apply(event)]
        last = next((event for event in reversed(shown) if event["event"] == "step"), None)
        shown = [event for event in shown if event["event"] != "step" or event is last]
        messages = [self._about(name, "events", {"events": clean(shown)})] if shown else []
        return messages + [self._about(name, "curves", body) for body in history.news()]

    def _about(self, peer: str, kind: str, body: dict[str, Any]) -> Message:
        return Message(kind, {"run": self.title, "peer": peer, **body})

    def _of_run(self, message: Message) -> Message:
        return message._replace(body={"run": self.title, **message.body})

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
        added = tail.read(_MOST_READ_BYTES)
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
        if not isinstance(told.rows, list) or is_deep(told.rows):
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
        ends = {
            self._own_ids.get(name): {"state": end, "ended_s": self.histories[name].ended_s}
            for name, end in self._ended.items()
        }
        others = None if len(self._ended) < len(self.histories) else {"state": _UNKNOWN}
        rows = []
        for row in self._told.rows:
            end = ends.get(str(row.get("peer_id")), others)
            rows.append(row if end is None else {**row, **end, "reachable": None})
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

    def lose(self, time_s: float) -> list[Message]:
        """Take note that nobody is left to tell of anybody."""
        lost = {"state": _UNKNOWN, "reachable": None}
        return self.replace([{**row, **lost} for row in self._rows.values()], time_s, "")

    def snapshot(self) -> list[Message]:
        """Return the whole table, if there is one."""
        return [self._message(list(self._rows.values()), [])] if self._rows else []

    def _message(self, rows: list[dict[str, Any]], gone: list[str]) -> Message:
        body = {"rows": rows, "gone": gone, "time_s": self._time_s, "told_by": self._told_by}
        return Message("swarm", body)


def clean(value: Any) -> Any:
    """Return JSON values that browsers read: what is not finite becomes a text, such as `"nan"`."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    return value


def source_of(folders: Sequence[Path]) -> Source:
    """Return what follows a run, or several.

    Raises:
        ConfigError: a folder is none of a run, of a peer, or of runs.
    """
    if len(folders) == 1 and not is_folder_of_runs(folders[0]):
        return FolderSource(folders[0])
    return RunsSource(folders)


def is_folder_of_runs(folder: Path) -> bool:
    """Return whether there are runs in a folder, rather than peers or nothing."""
    return any(folder.glob(f"*/*/{EVENTS_FILE}"))


class RunsSource:
    """Follows several runs; those that come into a folder of runs are taken in."""

    def __init__(self, targets: Sequence[Path]) -> None:
        """Follow what is there, and what comes.

        Raises:
            ConfigError: a target is not a folder of a run, of a peer, or of runs.
        """
        self.title = ", ".join(dict.fromkeys(target.absolute().name for target in targets))
        self._parents = [target for target in targets if is_folder_of_runs(target)]
        self._sources: dict[Path, FolderSource] = {}
        for target in targets:
            if target not in self._parents:
                self._take(target)
        self._look()

    @property
    def sources(self) -> list[FolderSource]:
        """The runs, in the order in which they were found; each has a title of its own."""
        return [*self._sources.values()]

    def poll(self) -> list[Message]:
        self._look()
        return [message for source in self.sources for message in source.poll()]

    def snapshot(self) -> list[Message]:
        return [message for source in self.sources for message in source.snapshot()]

    def _look(self) -> None:
        for parent in self._parents:
            for folder in sorted(path for path in parent.glob("*") if path.is_dir()):
                with contextlib.suppress(ConfigError):  # it holds no run, perhaps not yet
                    self._take(folder)

    def _take(self, folder: Path) -> None:
        key = folder.resolve()
        if key in self._sources:
            return
        source = FolderSource(folder)
        taken = {other.title for other in self._sources.values()}
        names = (f"{source.title} ({number})" for number in count(2))
        if source.title in taken:
            source.title = next(name for name in names if name not in taken)
        self._sources[key] = source
