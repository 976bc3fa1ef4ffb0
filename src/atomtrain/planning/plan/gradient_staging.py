"""Where gradients wait on the host: each in a place of its own, or a segment's in one of two rooms.

Where updates wait for the norm of all gradients, all of them have to be there at once. Without
clipping a gradient is spent as soon as it came, so a few rooms will do which backward's segments
take in turn: each as large as the largest segment's gradients. A segment's gradients then leave the
device once the update of the segment that had the room before is done.

What adds up on the host keeps a place of its own: weights that several segments share, unless they
are resident, and those of layers on the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

from atomtrain.planning.plan.layout import Layout
from atomtrain.planning.plan.shape import Layers, Shape

ROOMS = 2
"""One is filled while the other is spent."""


class HostGradients(NamedTuple):
    """The host's buffer of gradients."""

    starts: Mapping[int, int]
    """First byte of each block's gradients, by block; those that never come to the host have none.
    """
    total_bytes: int
    rooms: Mapping[Layers, int]
    """Which room a segment of backward takes; empty if every block has a place of its own."""


def every_gradient(layout: Layout) -> HostGradients:
    """Return a place for every block, as the layout has them."""
    starts = {block: layout.gradient_range(block)[0] for block in range(layout.blocks)}
    return HostGradients(starts, layout.gradient_factor * layout.gradients.total_bytes, {})


def host_gradients(layout: Layout, shape: Shape, *, spends: bool) -> HostGradients:
    """Return where the gradients of a shape wait; `spends`: only until their own update."""
    if not spends:
        return every_gradient(layout)
    segments = list(reversed(list(itertools.pairwise(shape.backward_bounds))))
    passing = [_passing(layout, shape, layers) for layers in segments]
    room_bytes = max((_bytes(layout, blocks) for blocks in passing), default=0)
    starts: dict[int, int] = {}
    for number, blocks in enumerate(passing):
        at = number % ROOMS * room_bytes
        for block in blocks:
            starts[block] = at
            at += _bytes(layout, [block])
    at = min(ROOMS, len(segments)) * room_bytes
    for block in range(layout.blocks):
        if block not in starts and block not in shape.device_blocks:
            starts[block] = at
            at += _bytes(layout, [block])
    return HostGradients(starts, at, {layers: i % ROOMS for i, layers in enumerate(segments)})


def _passing(layout: Layout, shape: Shape, layers: Layers) -> list[int]:
    """Return the blocks whose whole gradients leave after a segment, in the layout's order."""
    start, _ = layers
    return [
        block
        for block in layout.blocks_of(*layers)
        if block not in shape.device_blocks
        and layout.users(block)[0] >= start
        and (block in shape.resident_blocks or len(layout.users(block)) == 1)
    ]


def _bytes(layout: Layout, blocks: list[int]) -> int:
    ranges = (layout.gradient_range(block) for block in blocks)
    return sum(stop - start for start, stop in ranges)
