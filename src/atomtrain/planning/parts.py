"""The segments that a step ends with are often those that the next step begins with.

Little hides their hand-over: their gradients leave, they are updated, they come back. So that is
done part by part, each a run of whole parameters, and the link works in both directions at once.
Nothing at all hides that of the last one, which is the next step's first, and it begins when those
before it are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from atomtrain.planning.layout import Layout

_MOST_PARTS = 8
_LEAST_BYTES = 1 << 20
"""Of a part; smaller ones cost more than they gain."""


class Part(NamedTuple):
    """Some parameters of a block that lie one behind the other."""

    start_bytes: int
    """Where they begin in the arenas of parameters and of gradients."""
    stop_bytes: int
    members: tuple[nn.Parameter, ...]


def parts_of(layout: Layout, block: int, members: Sequence[nn.Parameter]) -> tuple[Part, ...]:
    """Return the parts of a block, in order and without gaps; none if it is not to be divided.

    Args:
        layout: Of the host store.
        block: A layer's own parameters, or a shared weight.
        members: The parameters of the block.
    """
    if layout.gradients is not layout or layout.gradient_factor != 1:
        return ()  # gradients do not lie as parameters do
    start, stop = layout.block_range(block)
    least_bytes = max(_LEAST_BYTES, (stop - start) // _MOST_PARTS)
    parts: list[Part] = []
    at, inside = stop, list[nn.Parameter]()
    for parameter in sorted(members, key=lambda p: layout.offsets[id(p)], reverse=True):
        inside.insert(0, parameter)
        offset = layout.offsets[id(parameter)]
        if at - offset >= least_bytes and offset - start >= least_bytes:
            parts.insert(0, Part(offset, at, tuple(inside)))
            at, inside = offset, []
    parts.insert(0, Part(start, at, tuple(inside)))
    return tuple(parts) if len(parts) > 1 else ()
