"""What a plan decides, and the schedule that follows: which segment is visited when, in which slot.

A step visits the forward segments upwards, then the turn for forward and backward at once, then
the backward segments downwards (recompute and backward). Each visit runs all micro-batches.
"""

from __future__ import annotations

import bisect
import enum
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

Boundary = Literal["device", "host"]
"""Where the values at a cut wait for the next segment."""
Activation = Literal["recompute", "keep", "offload"]
"""What backward needs of a segment's forward: computed again, kept on the device for all
micro-batches, or waiting on the host."""
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
Layers = tuple[int, int]
"""A range of layers: the first, and the one after the last."""


class Shape(NamedTuple):
    """One point of the search space; all that the executor must know beside sizes."""

    forward_bounds: tuple[int, ...]
    """Forward segment `s` holds layers `forward_bounds[s]` to `forward_bounds[s + 1]`; the last
    bound is where the turn begins."""
    backward_bounds: tuple[int, ...]
    """Backward segment `s` holds layers `backward_bounds[s]` to `backward_bounds[s + 1]`; the last
    segment is the turn, which runs forward and backward at once."""
    slots: int
    gradient_buffers: int
    boundary: Boundary = "device"
    resident_blocks: tuple[int, ...] = ()
    """Blocks with places of their own on the device, in increasing order. A number below that of
    the layers is a layer's own parameters, the ones from there on are the shared weights."""
    host_layers: int = 0
    """How many leading layers run on the host; both partitions begin behind them."""
    activations: tuple[Activation, ...] = ()
    """One for each backward segment; empty means that all are recomputed."""
    device_blocks: tuple[int, ...] = ()
    """Those of the resident blocks whose optimizer runs on the device, so that nothing of them
    crosses the link in a step."""
    remakes: bool = True
    """Whether offloaded segments make again in backward what cheap operations can, or send all that
    they save to the host."""

    @property
    def segments(self) -> int:
        return len(self.backward_bounds) - 1

    @property
    def turn(self) -> Layers:
        return self.backward_bounds[-2], self.backward_bounds[-1]

    @property
    def waiting(self) -> dict[Layers, Activation]:
        """The segments whose graphs wait for backward, and where what is saved in them waits."""
        pairs = itertools.pairwise(self.backward_bounds)
        return {
            layers: activation
            for layers, activation in zip(pairs, self.activations, strict=False)
            if activation != "recompute"
        }

    def joins(self, users: Iterable[Sequence[int]]) -> list[list[bool]]:
        """Return which of the layers that share a weight have their backward in one visit, for each
        of these weights: whether each user is in the same as the one after it."""
        bounds = self.backward_bounds
        return [
            [
                bisect.bisect(bounds, one) == bisect.bisect(bounds, next_one)
                for one, next_one in itertools.pairwise(layers)
            ]
            for layers in users
        ]


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
        return self.phase is Phase.BACKWARD and self.activation != "recompute"

    @property
    def leaves(self) -> bool:
        return self.phase is Phase.FORWARD and self.activation != "recompute"


def training_visits(shape: Shape) -> tuple[Visit, ...]:
    order = [(Phase.FORWARD, layers) for layers in itertools.pairwise(shape.forward_bounds)]
    order.append((Phase.TURN, shape.turn))
    downwards = reversed(list(itertools.pairwise(shape.backward_bounds[:-1])))
    order += [(Phase.BACKWARD, layers) for layers in downwards]
    return _assign(order, shape.slots, shape.gradient_buffers, shape.waiting)


def evaluation_visits(shape: Shape) -> tuple[Visit, ...]:
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
