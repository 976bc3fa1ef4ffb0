"""What a view still needs of one peer's events, thinned out so that a long run stays small.

Of curves mean, least and greatest of equally many neighbours are kept. However long a run is, a
curve has at most `MOST_POINTS` points, and no peak is lost.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from atomtrain.events import Event

FIELDS = {
    "step": (
        "loss", "gradient_norm", "learning_rate", "tokens_per_s", "tokens_total", "step_s",
        "device_peak_bytes", "host_resident_bytes",
    ),
    "evaluation": ("loss", "bits_per_byte"),
    "round": ("duration_s", "bytes_sent", "bytes_received"),
}  # fmt: skip
"""Figures that are drawn as curves, by the kind of event that tells them."""
_MOST_ROUNDS = 200
_MOST_MESSAGES = 100
_NEWEST = ("run_started", "plan", "step", "timeline", "run_finished", "peer_lost")
"""Kinds of which the newest event is all that counts."""
_MESSAGES = ("evaluation", "membership", "expelled", "checkpoint", "sample", "warning")


class PeerHistory:
    """One peer's curves, its last rounds and messages, and the newest event of some kinds."""

    def __init__(self) -> None:
        self.curves = {kind: Curves(fields) for kind, fields in FIELDS.items()}
        self.rounds: deque[Event] = deque(maxlen=_MOST_ROUNDS)
        self.messages: deque[Event] = deque(maxlen=_MOST_MESSAGES)
        self.newest: dict[str, Event] = {}

    def apply(self, event: Event) -> bool:
        """Take in one event; return whether a view shows its kind."""
        kind = event["event"]
        if kind == "step" and isinstance(step := event.get("step"), int) and step >= 0:
            # An evaluation belongs to the state after its step: it goes when that is redone.
            self.curves["evaluation"].cut(step)
            self.curves["step"].add(step, event)
        elif kind == "evaluation":
            self.curves["evaluation"].add(event.get("step"), event)
        elif kind == "round":
            if event.get("outcome") != "fetched":  # that is of an anchor, whatever the round
                self.curves["round"].add(event.get("round"), event)
            self.rounds.append(event)
            return True
        if kind in _MESSAGES:
            self.messages.append(event)
        elif kind in _NEWEST:
            if kind == "run_started":
                self.newest.pop("run_finished", None)
                self.newest.pop("peer_lost", None)
            self.newest[kind] = event
        return kind in _MESSAGES or kind in _NEWEST

    @property
    def ended(self) -> str | None:
        """How the peer's run ended, such as `completed` or `lost`; `None` while it goes on."""
        if (end := self.newest.get("run_finished")) is not None:
            return str(end.get("reason", "finished"))
        return "lost" if "peer_lost" in self.newest else None

    @property
    def ended_s(self) -> float | None:
        """Unix time of the end, if there was one."""
        for kind in ("run_finished", "peer_lost"):
            if isinstance(found_s := self.newest.get(kind, {}).get("time_s"), int | float):
                return float(found_s)
        return None

    def events(self) -> list[Event]:
        """Return the events from which a view can be made anew; curves come beside them."""
        return [*self.newest.values(), *self.rounds, *self.messages]

    def news(self) -> list[dict[str, Any]]:
        """Return what changed in the curves since the last call."""
        found = [(kind, curves.news()) for kind, curves in self.curves.items()]
        return [{"kind": kind, **body} for kind, body in found if body is not None]

    def bodies(self) -> list[dict[str, Any]]:
        found = [(kind, curves.body()) for kind, curves in self.curves.items()]
        return [{"kind": kind, **body} for kind, body in found if body is not None]


MOST_POINTS = 1024
_DIGITS = 6
_MOST = 1e300
_MOST_X = 1 << 53
"""Beyond it browsers do not tell whole numbers apart."""


class Curves:
    """Several figures that are told at the same x, such as the loss and speed of each step.

    Bucket b holds what was told for x from `every * b` to `every * (b + 1) - 1`. With too many
    buckets `every` doubles. It is a power of two, so the buckets of several peers lie side by side.
    """

    def __init__(self, fields: Sequence[str], most_points: int = MOST_POINTS) -> None:
        self.every = 1
        self._most_points = most_points
        self._starts: list[int] = []
        self._columns = {name: _Column() for name in fields}
        self._last_x = -1
        self._changed_from: int | None = None

    def add(self, x: Any, told: Mapping[str, Any]) -> None:
        """Take in what was told at `x`; what is not a number is a gap.

        An x that is not above the last one takes its place and that of all behind it: a peer that
        resumes repeats the steps after its checkpoint. The bucket that `x` falls in begins anew.
        """
        if not isinstance(x, int) or not 0 <= x < _MOST_X:
            return
        if x <= self._last_x:
            self.cut(x)
        start = x - x % self.every
        if not self._starts or self._starts[-1] != start:
            self._starts.append(start)
            for column in self._columns.values():
                column.open()
        for name, column in self._columns.items():
            value: Any = told.get(name)
            kind = value.__class__  # of a million steps this is most of the work
            if (kind is float or kind is int) and -_MOST < value < _MOST:
                column.add(value)
        self._last_x = x
        if self._changed_from is None:
            self._changed_from = start
        while len(self._starts) > self._most_points:
            self._halve()

    def cut(self, x: int) -> None:
        """Drop what was told at `x` and behind it."""
        if x > self._last_x:
            return
        start = x - x % self.every
        index = bisect_left(self._starts, start)
        del self._starts[index:]
        for column in self._columns.values():
            column.cut(index)
        self._last_x = start - 1
        before = self._changed_from
        self._changed_from = start if before is None else min(before, start)

    def points(self, field: str) -> list[tuple[float, float]]:
        """Return x and mean of a figure, without gaps."""
        column = self._columns[field]
        found = zip(self._starts, map(column.mean, range(len(self._starts))), strict=True)
        return [(start, mean) for start, mean in found if mean is not None]

    def news(self) -> dict[str, Any] | None:
        """Return what changed since the last call: all from some x on. `None`: nothing did."""
        if self._changed_from is None:
            return None
        start, self._changed_from = self._changed_from, None
        return self._body(start)

    def body(self) -> dict[str, Any] | None:
        """Return all there is, as JSON values; `None` if there is nothing."""
        return self._body(0) if self._starts else None

    def _body(self, start: int) -> dict[str, Any]:
        index = bisect_left(self._starts, start)
        fields = {
            name: column.body(index, exact=self.every == 1)
            for name, column in self._columns.items()
            if any(column.counts)
        }
        return {"from": start, "every": self.every, "x": self._starts[index:], "fields": fields}

    def _halve(self) -> None:
        """Join neighbours."""
        self.every *= 2
        starts: list[int] = []
        joined = {name: _Column() for name in self._columns}
        for index, before in enumerate(self._starts):
            start = before - before % self.every
            if not starts or starts[-1] != start:
                starts.append(start)
                for column in joined.values():
                    column.open()
            for name, column in joined.items():
                column.join(self._columns[name], index)
        self._starts, self._columns = starts, joined
        self._changed_from = 0


class _Column:
    """One figure's buckets: lists of equal length."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self._sums: list[float] = []
        self._lows: list[float] = []
        self._highs: list[float] = []

    def open(self) -> None:
        self.counts.append(0)
        self._sums.append(0.0)
        self._lows.append(math.inf)
        self._highs.append(-math.inf)

    def add(self, value: float) -> None:
        """Take a value into the last bucket."""
        self.counts[-1] += 1
        self._sums[-1] += value
        lows, highs = self._lows, self._highs
        if value < lows[-1]:  # noqa: PLR1730 - twice as fast as min()
            lows[-1] = value
        if value > highs[-1]:  # noqa: PLR1730
            highs[-1] = value

    def join(self, other: _Column, index: int) -> None:
        self.counts[-1] += other.counts[index]
        self._sums[-1] += other._sums[index]
        self._lows[-1] = min(self._lows[-1], other._lows[index])
        self._highs[-1] = max(self._highs[-1], other._highs[index])

    def cut(self, index: int) -> None:
        for values in (self.counts, self._sums, self._lows, self._highs):
            del values[index:]

    def mean(self, index: int) -> float | None:
        """Return the mean of a bucket, or `None` if nothing was told."""
        count = self.counts[index]
        return self._sums[index] / count if count else None

    def body(self, index: int, *, exact: bool) -> dict[str, Any]:
        """Return the buckets from an index on; least and greatest only where they may differ."""
        there = range(index, len(self.counts))
        means = [None if (mean := self.mean(i)) is None else _short(mean) for i in there]
        if exact:
            return {"mean": means}
        lows, highs = (
            [_short(values[i]) if self.counts[i] else None for i in there]
            for values in (self._lows, self._highs)
        )
        return {"mean": means, "low": lows, "high": highs}


def _short(value: float) -> float:
    """Return a number that takes few digits to send; whole ones stay as they are."""
    short = float(f"{value:.{_DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < _MOST_X else short
