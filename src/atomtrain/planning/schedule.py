"""The vertical schedule: in which order segments are visited, and which slot each one uses.

A step visits the segments upwards (forward), then the last one for forward and backward at once
(the turn), then the others downwards (recompute and backward). Each visit runs all micro-batches.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

NEVER = 1 << 30


class Phase(enum.Enum):
    """What a visit does for each micro-batch."""

    FORWARD = "forward"
    """Forward without a graph."""
    TURN = "turn"
    """Forward with a graph, loss, backward."""
    BACKWARD = "backward"
    """Forward again with a graph, then backward."""
    EVALUATE = "evaluate"
    """Forward without a graph, nothing kept for backward."""


class Visit(NamedTuple):
    """One segment's turn on the device."""

    phase: Phase
    segment: int
    slot: int
    load: bool
    """False if the slot still holds the segment from an earlier visit of this step."""
    free_after: int
    """Index of the visit after which the slot may be overwritten; -1 if it is free at once."""
    gradient: int | None
    """Gradient buffer, in the turn and in backward."""


def training_visits(segments: int, slots: int, gradient_buffers: int) -> tuple[Visit, ...]:
    """Return the visits of one training step."""
    order = [(Phase.FORWARD, segment) for segment in range(segments - 1)]
    order.append((Phase.TURN, segments - 1))
    order += [(Phase.BACKWARD, segment) for segment in reversed(range(segments - 1))]
    return _assign(order, slots, gradient_buffers)


def evaluation_visits(segments: int, slots: int) -> tuple[Visit, ...]:
    """Return the visits of one evaluation."""
    return _assign([(Phase.EVALUATE, segment) for segment in range(segments)], slots, 1)


def _assign(
    order: Sequence[tuple[Phase, int]], slots: int, gradient_buffers: int
) -> tuple[Visit, ...]:
    """Give each visit a slot: a hit where possible, else the slot whose content is needed last.

    That is Belady's rule, optimal in the number of loads, except that the slot in use by the
    visit before is spared (with two slots or more): loading into it could not be hidden.
    """
    content: list[int | None] = [None] * slots
    last_use = [-1] * slots
    visits: list[Visit] = []
    backward = 0
    for index, (phase, segment) in enumerate(order):
        hit = segment in content
        if hit:
            slot = content.index(segment)
        else:
            # Before the first visit no slot is in use.
            busy = index - 1 if slots > 1 and index > 0 else None
            usable = [s for s in range(slots) if last_use[s] != busy]
            slot = max(usable, key=lambda s: (_next_use(order, index, content[s]), -last_use[s]))
        gradient = None
        if phase in (Phase.TURN, Phase.BACKWARD):
            gradient = backward % gradient_buffers
            backward += 1
        visits.append(Visit(phase, segment, slot, not hit, last_use[slot], gradient))
        content[slot] = segment
        last_use[slot] = index
    return tuple(visits)


def _next_use(order: Sequence[tuple[Phase, int]], index: int, segment: int | None) -> int:
    if segment is None:
        return NEVER
    later = (i for i in range(index, len(order)) if order[i][1] == segment)
    return next(later, NEVER)
