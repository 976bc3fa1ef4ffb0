"""What visits take and hand on; what they take comes to the device one micro-batch ahead.

Values stay on the device across a forward cut; they are saved where backward begins a segment,
since it starts again from there.

While the last micro-batch of a visit computes, the first one of the next visit comes, so no visit
begins by waiting for the link; but only if it takes no more than what came ahead within the visit.
So much is counted in the memory of each visit, and its last micro-batch has no use for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from atomtrain.analysis.layers.chain import Chain
from atomtrain.engine.execution.boundary_activations import BoundaryActivations
from atomtrain.planning.cost.timeline import label_of
from atomtrain.planning.plan.plan import Plan
from atomtrain.planning.plan.shape import Boundary, Phase, Visit


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


class ActivationPrefetch:
    """Brings values and gradients of micro-batches. Used by the computing thread only."""

    def __init__(self, values: BoundaryActivations, gradients: BoundaryActivations) -> None:
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


class Route(NamedTuple):
    """What a forward visit does with values."""

    outputs: tuple[str, ...]
    """Values that it hands on, in the order of writing; the loss may be among them."""
    keep: frozenset[str]
    """Those that stay on the device for the next visit."""
    save: frozenset[str]
    """Those that go to the host."""
    last_read: frozenset[str]
    """Values that it reads and nobody will read again in this step, forward or backward."""


def forward_routes(chain: Chain, visits: Sequence[Visit], boundary: Boundary) -> dict[int, Route]:
    """Return the route of each visit that runs forward only, by its index."""
    going = (Phase.FORWARD, Phase.EVALUATE)
    upwards = [v.layers for v in visits if v.phase is not Phase.BACKWARD]
    again: set[str] = set()  # what backward starts from
    for visit in visits:
        if visit.phase is Phase.BACKWARD and not visit.finds:
            again.update(chain.reads(*visit.layers))
    routes = {}
    for index, visit in enumerate(visits):
        if visit.phase not in going:
            continue
        start, stop = visit.layers
        later = [set(chain.reads(*layers)) for layers in upwards[index + 1 :]]
        following = later[0] if later else set()
        beyond = set[str]().union(*later[1:])
        leaves = {*chain.writes(start, stop), *again}
        outputs = tuple(
            name for layer in chain.layers[start:stop] for name in layer.writes if name in leaves
        )
        keep = frozenset(outputs) & following if boundary == "device" else frozenset()
        save = frozenset(outputs) & ((following | beyond | again) - (keep - beyond - again))
        finished = frozenset(chain.reads(start, stop)) - following - beyond - again
        routes[index] = Route(outputs, keep, save, finished - frozenset(chain.inputs))
    return routes


class Pass:
    """The visits of a step or of an evaluation, and where their values come from and go."""

    def __init__(self, chain: Chain, visits: Sequence[Visit], plan: Plan) -> None:
        self.visits = visits
        self.routes = forward_routes(chain, visits, plan.boundary)
        """Of forward visits, by index."""
        self.wanted = [*(wanted_by(chain, visit) for visit in visits), NOTHING]
        """What each visit takes, and nothing after the last one."""
        self.found = [visit.layers for visit in visits if visit.finds]
        """The segments whose graphs wait, in backward's order."""
