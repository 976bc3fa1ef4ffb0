"""What visits take from the host comes to the device one micro-batch ahead.

While the last micro-batch of a visit computes, the first one of the next visit comes, so no visit
begins by waiting for the link; but only if it takes no more than what came ahead within the visit.
So much is counted in the memory of each visit, and its last micro-batch has no use for it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from atomtrain.analysis.layers.chain import Chain
from atomtrain.engine.execution.boundary_activations import Carried
from atomtrain.planning.cost.timeline import label_of
from atomtrain.planning.plan.schedule import Phase, Visit


class Wanted(NamedTuple):
    """What a visit takes of each micro-batch."""

    values: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    label: str | None = None
    """Names the transfers in traces; `None` is what compute does when they are submitted."""


NOTHING = Wanted()


def wanted_by(chain: Chain, visit: Visit) -> Wanted:
    """Return what a visit takes."""
    reads, writes = chain.reads(*visit.layers), chain.writes(*visit.layers)
    forward = visit.phase in (Phase.FORWARD, Phase.EVALUATE)
    return Wanted(
        values=() if visit.finds else reads,
        # Gradients of values that pass this segment by stay where they are.
        gradients=() if forward else (*writes, *reads),
        label=label_of(visit),
    )


class Coming:
    """Brings values and gradients of micro-batches. Used by the computing thread only."""

    def __init__(self, values: Carried, gradients: Carried) -> None:
        self._values, self._gradients = values, gradients
        self._now = self._next = NOTHING
        self._count = self._most_ahead_bytes = 0

    def begin(self, now: Wanted, following: Wanted, count: int) -> None:
        """Start a visit of `count` micro-batches; `following` is what the next visit takes."""
        self._now, self._next, self._count = now, following, count
        self._most_ahead_bytes = 0

    def take(self, micro_batch: int) -> dict[str, Any]:
        """Return a micro-batch's values on the device by name, and begin to bring the next one's;
        compute waits until they are there."""
        self._bring(micro_batch, self._now)
        taken = {name: self._values.take(micro_batch, name) for name in self._now.values}
        if micro_batch + 1 < self._count:
            ahead_bytes = self._bring(micro_batch + 1, self._now)
            self._most_ahead_bytes = max(self._most_ahead_bytes, ahead_bytes)
        elif self._away_bytes(0, self._next) <= self._most_ahead_bytes:
            self._bring(0, self._next)
        return taken

    def _bring(self, micro_batch: int, wanted: Wanted) -> int:
        """Begin to bring what is not on the device; return how many bytes that are."""
        n_bytes = self._away_bytes(micro_batch, wanted)
        self._values.prefetch(micro_batch, wanted.values, wanted.label)
        self._gradients.prefetch(micro_batch, wanted.gradients, wanted.label)
        return n_bytes

    def _away_bytes(self, micro_batch: int, wanted: Wanted) -> int:
        return self._values.away_bytes(micro_batch, wanted.values) + self._gradients.away_bytes(
            micro_batch, wanted.gradients
        )
