"""What anybody may see of a run: its course, who contributed, what the model says.

Everything is made anew here, from the fields that are named; nothing is passed on as it came. So
no address, path, token or message of a run leaves the server, whatever its events hold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import PureWindowsPath
from typing import Any

from atomtrain.views.dashboard.source import Message, Source
from atomtrain.views.runs.event_text import number, printable

_CURVES = {"step": ("loss", "tokens_per_s"), "evaluation": ("loss", "bits_per_byte")}
"""Figures that are shown as curves, by the kind of event that tells them."""
_ENDS = {"run_finished": "finished", "peer_lost": "lost"}
_MOST_SAMPLES = 60
_MOST_LEADERS = 1000
_MOST_LETTERS = 2000
_NAME_LETTERS = 60
_ROUNDS_REMEMBERED = 4096
_MOST_TOKENS = 1 << 53
"""Of a peer in a round: more is a lie."""


class PublicSource:
    """Turns what another source tells into what everybody may see."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.title = source.title
        self._abouts: dict[tuple[str, str], dict[str, Any]] = {}
        self._samples: dict[str, deque[dict[str, Any]]] = {}
        self._leaders: dict[str, Leaders] = {}

    def poll(self) -> list[Message]:
        news: dict[tuple[str, ...], Message] = {}
        curves = []
        for message in self._source.poll():
            if message.kind == "curves":
                curves += _public_curves(message)
            else:
                self._take(message, news)
        return [*news.values(), *curves]

    def snapshot(self) -> list[Message]:
        return [
            *(Message("about", body) for body in self._abouts.values()),
            *(one for message in self._source.snapshot() for one in _public_curves(message)),
            *map(self._told_samples, self._samples),
            *map(self._told_leaders, self._leaders),
        ]

    def _take(self, message: Message, news: dict[tuple[str, ...], Message]) -> None:
        """Take in one message; put what it makes of the page into `news`, by what it is of."""
        body = message.body
        run = str(body["run"])
        if message.kind == "swarm":
            self._leaders.setdefault(run, Leaders()).hear(body["rows"])
            news["leaders", run] = self._told_leaders(run)
        elif message.kind == "events":
            for event in body["events"]:
                self._take_event(run, _name(body["peer"]), event, news)

    def _take_event(
        self, run: str, peer: str, event: Mapping[str, Any], news: dict[tuple[str, ...], Message]
    ) -> None:
        kind = event["event"]
        if kind == "sample":
            samples = self._samples.setdefault(run, deque(maxlen=_MOST_SAMPLES))
            samples.append(_public_sample(peer, event))
            news["samples", run] = self._told_samples(run)
        elif kind == "round":
            self._leaders.setdefault(run, Leaders()).count(event)
            news["leaders", run] = self._told_leaders(run)
        elif kind in ("run_started", "step", *_ENDS):
            about = self._abouts.get((run, peer), {"run": run, "peer": peer})
            self._abouts[run, peer] = {**about, **_public_about(event)}
            news["about", run, peer] = Message("about", self._abouts[run, peer])

    def _told_samples(self, run: str) -> Message:
        return Message("samples", {"run": run, "rows": [*self._samples[run]]})

    def _told_leaders(self, run: str) -> Message:
        return Message("leaders", {"run": run, "rows": self._leaders[run].rows()})


class Leaders:
    """Who contributed: the tokens of each peer that rounds accepted.

    Of what a peer says of itself only its name and state are told; nothing of it counts.
    """

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, Any]] = {}
        self._seen: dict[tuple[str, ...], None] = {}
        """Rounds that were counted, the last one last: every member tells of its own."""

    def hear(self, rows: Any) -> None:
        """Take in the swarm's table of peers, or the part of it that changed."""
        for row in rows:
            told = self._of(row["peer_id"], row.get("name"))
            told["state"] = _word(row.get("state"))

    def count(self, event: Mapping[str, Any]) -> None:
        """Count a round once, whoever tells of it.

        Its `peer_ids`, `members` (their names) and `weights` (tokens) belong together.
        """
        ids, names, weights = (event.get(key) for key in ("peer_ids", "members", "weights"))
        if not isinstance(ids, list) or not isinstance(names, list) or len(ids) != len(names):
            return
        key = tuple(map(str, (event.get("round"), event.get("fragment"), *ids)))
        if key in self._seen or not ids:
            return
        self._seen[key] = None
        while len(self._seen) > _ROUNDS_REMEMBERED:
            del self._seen[next(iter(self._seen))]
        if not isinstance(weights, list) or len(weights) != len(ids):
            weights = [None] * len(ids)
        for peer_id, name, weight in zip(ids, names, weights, strict=True):
            row = self._of(peer_id, name)
            row["rounds"] += 1
            if isinstance(weight, int) and 0 <= weight < _MOST_TOKENS:
                row["accepted_tokens"] = (row["accepted_tokens"] or 0) + weight

    def rows(self) -> list[dict[str, Any]]:
        """Return one row a peer, those with most accepted tokens first."""
        order = sorted(
            self._rows.values(), key=lambda row: (-(row["accepted_tokens"] or 0), -row["rounds"])
        )
        return [dict(row) for row in order[:_MOST_LEADERS]]

    def _of(self, peer_id: Any, name: Any) -> dict[str, Any]:
        short = _name(str(peer_id)[-8:])
        new = {"peer": short, "accepted_tokens": None, "rounds": 0, "state": None}
        row = self._rows.setdefault(str(peer_id), {**new, "name": short})
        if name:
            row["name"] = _name(name)
        return row


def _public_about(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return what everybody may know of a peer, as far as an event tells it."""
    told = dict(event)
    if event["event"] == "run_started":
        # A model may have been named by its folder.
        model = PureWindowsPath(str(event.get("model", ""))).name[:_NAME_LETTERS]  # both slashes
        return {"model": printable(model), "parameters": number(told, "parameters"), "ended": None}
    if event["event"] == "step":
        fields = ("step", "steps", "tokens_total", "loss", "time_s")
        return {field: number(told, field) for field in fields}
    reason = event.get("reason") if event["event"] == "run_finished" else None
    return {"ended": _word(reason) or _ENDS[event["event"]], "ended_s": number(told, "time_s")}


def _public_curves(message: Message) -> list[Message]:
    """Return the curves that everybody may see of those in a message."""
    body = message.body
    if message.kind != "curves" or body["kind"] not in _CURVES:
        return []
    fields = {
        field: {part: found[part] for part in ("mean", "low", "high") if part in found}
        for field in _CURVES[body["kind"]]
        if (found := body["fields"].get(field)) is not None
    }
    of = {"run": str(body["run"]), "peer": _name(body["peer"]), "kind": body["kind"]}
    place = {"from": body["from"], "every": body["every"], "x": body["x"]}
    return [Message("curves", {**of, **place, "fields": fields})]


def _public_sample(peer: str, event: Mapping[str, Any]) -> dict[str, Any]:
    told = dict(event)
    text = {key: _text(event.get(key), _MOST_LETTERS) for key in ("prompt", "text")}
    return {"peer": peer, "step": number(told, "step"), "time_s": number(told, "time_s"), **text}


def _name(value: Any) -> str:
    """Return a name that peers or folders have given themselves."""
    return _text(value, _NAME_LETTERS)


def _word(value: Any) -> str | None:
    """Return a state: one word, or nothing. What is longer might be any text."""
    return value if isinstance(value, str) and value.isalpha() and len(value) < 20 else None


def _text(value: Any, most_letters: int) -> str:
    return printable(str(value or ""))[:most_letters]
