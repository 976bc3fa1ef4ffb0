"""Which values a visit hands on, and how: on the device, through the host, or both.

Values stay on the device across a forward cut; they are saved where backward begins a segment,
since it starts again from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from atomtrain.analysis.layers.chain import Chain
from atomtrain.engine.execution.activation_prefetch import NOTHING, wanted_by
from atomtrain.planning.plan.plan import Plan
from atomtrain.planning.plan.schedule import Phase, Visit
from atomtrain.planning.plan.shape import Boundary


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
