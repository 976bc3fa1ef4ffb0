"""The time from step to step, where the next one's first segments come while this one ends.

Only without clipping (then no update begins before the last gradient), with one device, and with
everything in memory. It is what the executor does: each slot that backward needs no more takes one
of the segments with which the next step begins, as soon as that is updated, and a segment of one
block that is the same in both directions is handed over part by part (`planning/parts.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from atomtrain.analysis.chain import Chain
from atomtrain.planning.host import HostTime
from atomtrain.planning.layout import Layout
from atomtrain.planning.parts import parts_of
from atomtrain.planning.schedule import HandOver, Phase, Visit, hand_overs
from atomtrain.planning.shape import Shape
from atomtrain.planning.timeline import WHOLE, Streams, VisitTime

_STEPS = 6
"""Laid out one after the other. What the first one begins with is forgotten soon."""
_COUNTED = 3
"""The last of them, whose mean is told."""


class Coming(NamedTuple):
    """A segment of the next step that comes ahead."""

    over: HandOver
    updated_by: int
    """Index of the visit after which all of it is updated."""
    shares: tuple[float, ...]
    """Its parts."""

    @property
    def submitted(self) -> tuple[int, int]:
        """The visit after which it may come, and its place among those of that visit."""
        return max(self.over.free_after, self.updated_by), self.over.free_after


def coming_segments(
    shape: Shape, visits: Sequence[Visit], chain: Chain, layout: Layout, *, in_parts: bool
) -> list[Coming]:
    """Return what comes for the next step, in the order in which it does.

    Args:
        shape: What the visits are of.
        visits: Of a training step.
        chain: The model.
        layout: Of the chain.
        in_parts: Whether the optimizer can update a block part by part.
    """
    delivers = {}
    for index, visit in enumerate(visits):
        if visit.gradient is not None:
            delivers.update(dict.fromkeys(range(*visit.layers), index))
    coming = []
    for over in hand_overs(visits):
        layers = visits[over.visit].layers
        blocks = arriving(shape, layout, *layers)
        lowest = [layout.users(block, shape.host_layers)[0] for block in blocks]
        updated_by = max((delivers[layer] for layer in lowest), default=-1)
        shares: tuple[float, ...] = WHOLE
        if in_parts and len(blocks) == 1 and visits[updated_by].layers == layers:
            shares = _shares(layout, blocks[0], chain) or WHOLE
        coming.append(Coming(over, updated_by, shares))
    return sorted(coming, key=lambda each: each.submitted)


def arriving(shape: Shape, layout: Layout, start: int, stop: int) -> list[int]:
    """Return the blocks that are loaded for forward of a segment."""
    blocks = [b for b in layout.blocks_of(start, stop) if b not in shape.resident_blocks]
    for block in set(shape.resident_blocks).difference(shape.device_blocks):
        first = layout.users(block, shape.host_layers)[0]
        if start <= first < stop or (block in shape.early_blocks and start <= first):
            blocks.append(block)
    return blocks


def _shares(layout: Layout, block: int, chain: Chain) -> tuple[float, ...]:
    start, stop = layout.block_range(block)
    members = [p for p in chain.parameters if start <= layout.offsets[id(p)] < stop]
    parts = parts_of(layout, block, members)
    return tuple((part.stop_bytes - part.start_bytes) / (stop - start) for part in parts)


def period_s(
    visits: Sequence[Visit],
    times: Sequence[VisitTime],
    coming: Sequence[Coming],
    aside: HostTime,
    *,
    spends: bool = False,
) -> float:
    """Return the seconds from one step's beginning to the next one's, in a row of steps.

    Args:
        visits: Of a training step.
        times: The seconds of each visit.
        coming: What comes for the next step, in order.
        aside: What layers on the host take: the first visit waits for their forward, which waits
            for their backward and update.
        spends: Whether gradients share rooms on the host.
    """
    streams, begun = Streams(spends=spends), list[float]()
    updated = [0.0] * max(stop for _, stop in (visit.layers for visit in visits))
    # Where several wait for one visit, none is handed over in parts.
    shares = {each.updated_by: each.shares for each in coming}
    loaded: dict[int, float] = {}
    for _ in range(_STEPS):
        streams.ends_s.clear()
        moments: dict[int, list[float]] = {}
        for index, (visit, time) in enumerate(zip(visits, times, strict=True)):
            layers = slice(*visit.layers)
            streams.lay(
                visit,
                time,
                loaded_s=loaded.get(index),
                updated_s=0.0 if visit.phase is Phase.BACKWARD else max(updated[layers]),
                shares=shares.get(index, WHOLE),
            )
            if index == 0:
                begun.append(streams.compute_s - time.visit_s)
            if visit.gradient is not None:
                updated[layers] = [streams.update_s] * len(updated[layers])
                moments[index] = streams.updated_s
        for each in coming:
            free_s = streams.ends_s[each.submitted[0]]
            there = moments.get(each.updated_by, [0.0])
            for share, updated_s in zip(each.shares, there, strict=True):
                begin_s = max(streams.load_s, free_s, updated_s)
                streams.load_s = begin_s + share * times[each.over.visit].load_s
            loaded[each.over.visit] = streams.load_s
        if aside.step_s:
            streams.update_s = max(streams.update_s, streams.compute_s) + aside.backward_s
            streams.compute_s = max(streams.compute_s, streams.update_s) + aside.forward_s
    return (begun[-1] - begun[-1 - _COUNTED]) / _COUNTED
