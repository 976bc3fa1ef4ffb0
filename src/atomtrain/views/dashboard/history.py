"""What a view still needs of one peer's events, thinned out so that a long run stays small."""

from __future__ import annotations

from collections import deque
from typing import Any

from atomtrain.events import Event
from atomtrain.views.dashboard.curves import Curves

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
        if kind == "step" and _is_step(event.get("step")):
            # An evaluation belongs to the state after its step: it goes when that is redone.
            self.curves["evaluation"].cut(event["step"])
            self.curves["step"].add(event["step"], event)
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
        """Return the curves as they are."""
        found = [(kind, curves.body()) for kind, curves in self.curves.items()]
        return [{"kind": kind, **body} for kind, body in found if body is not None]


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and value >= 0
