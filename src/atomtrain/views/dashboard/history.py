"""What a view must know of a peer: its events, thinned out so that a long run stays small."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from atomtrain.events import Event

MOST_STEPS = 2000
"""Step events kept at most, about; with more, every second one goes."""
_MOST_ROUNDS = 200
_MOST_MESSAGES = 100
_NEWEST = ("run_started", "plan", "timeline", "run_finished", "peer_lost")
"""Kinds of which the newest event is all that counts."""
_MESSAGES = ("membership", "checkpoint", "sample", "warning")


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
