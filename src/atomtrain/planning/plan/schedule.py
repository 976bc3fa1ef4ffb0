"""The vertical schedule: in which order segments are visited, and which slot each one uses.

A step visits the forward segments upwards, then the turn for forward and backward at once, then
the backward segments downwards (recompute and backward). Each visit runs all micro-batches.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from atomtrain.planning.plan.shape import Activation, Layers, Shape

NEVER = 1 << 30


class Phase(enum.Enum):
    """What a visit does for each micro-batch."""

    FORWARD = "forward"
    """Forward without a graph, or with one that waits for backward."""
    TURN = "turn"
    """Forward with a graph, loss, backward."""
    BACKWARD = "backward"
    """Forward again with a graph (unless one waits), then backward."""
    EVALUATE = "evaluate"
    """Forward without a graph, nothing kept for backward."""


class Visit(NamedTuple):
    """One segment's turn on the device."""

    phase: Phase
    layers: Layers
    slot: int
    load: bool
    """False if the slot still holds the segment from an earlier visit of this step."""
    free_after: int
    """Index of the visit after which the slot may be overwritten; -1 if it is free at once."""
    gradient: int | None
    """Gradient buffer, in the turn and in backward."""
    activation: Activation = "recompute"
    """Unless it is `recompute`, the graphs of all micro-batches wait from this forward visit on, or
    are found at this backward visit."""
    home: int = 0
    """The slot in which the segment's graph was built; `slot`, but for graphs that are found."""

    @property
    def finds(self) -> bool:
        """Whether backward finds its graphs."""
        return self.phase is Phase.BACKWARD and self.activation != "recompute"

    @property
    def leaves(self) -> bool:
        """Whether forward leaves graphs for backward."""
        return self.phase is Phase.FORWARD and self.activation != "recompute"


def training_visits(shape: Shape) -> tuple[Visit, ...]:
    """Return the visits of one training step."""
    order = [(Phase.FORWARD, layers) for layers in itertools.pairwise(shape.forward_bounds)]
    order.append((Phase.TURN, shape.turn))
    downwards = reversed(list(itertools.pairwise(shape.backward_bounds[:-1])))
    order += [(Phase.BACKWARD, layers) for layers in downwards]
    return _assign(order, shape.slots, shape.gradient_buffers, shape.waiting)


def evaluation_visits(shape: Shape) -> tuple[Visit, ...]:
    """Return the visits of one evaluation."""
    bounds = (*shape.forward_bounds, shape.turn[1])
    order = [(Phase.EVALUATE, layers) for layers in itertools.pairwise(bounds)]
    return _assign(order, shape.slots, 1, {})


def _assign(
    order: Sequence[tuple[Phase, Layers]],
    slots: int,
    gradient_buffers: int,
    waiting: Mapping[Layers, Activation],
) -> tuple[Visit, ...]:
    """Give each visit a slot: a hit where possible, else the slot whose content is needed last.

    That is Belady's rule, optimal in the number of loads, except that the slot in use by the
    visit before is spared (with two slots or more): loading into it could not be hidden.
    """
    content: list[Layers | None] = [None] * slots
    last_use = [-1] * slots
    homes: dict[Layers, int] = {}
    visits: list[Visit] = []
    backward = 0
    for index, (phase, layers) in enumerate(order):
        hit = layers in content
        if hit:
            slot = content.index(layers)
        else:
            # Before the first visit no slot is in use.
            busy = index - 1 if slots > 1 and index > 0 else None
            usable = [s for s in range(slots) if last_use[s] != busy]
            slot = max(usable, key=lambda s: (_next_use(order, index, content[s]), -last_use[s]))
        gradient = None
        if phase in (Phase.TURN, Phase.BACKWARD):
            gradient = backward % gradient_buffers
            backward += 1
        activation = waiting.get(layers, "recompute")
        home = slot
        if phase is Phase.FORWARD:
            homes[layers] = slot
        elif activation != "recompute":
            home = homes[layers]
        free_after = last_use[slot]
        visits.append(Visit(phase, layers, slot, not hit, free_after, gradient, activation, home))
        content[slot] = layers
        last_use[slot] = index
    return tuple(visits)


def _next_use(order: Sequence[tuple[Phase, Layers]], index: int, layers: Layers | None) -> int:
    if layers is None:
        return NEVER
    later = (i for i in range(index, len(order)) if order[i][1] == layers)
    return next(later, NEVER)
