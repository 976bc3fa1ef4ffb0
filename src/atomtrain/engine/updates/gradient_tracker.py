"""Which gradients of a step have come to the host, block by block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from atomtrain.engine.devices.streams import Event
from atomtrain.planning.plan.shape import Layers


class GradientTracker:
    """The gradients of one step on their way to one place on the host."""

    def __init__(self, blocks: Sequence[Sequence[nn.Parameter]]) -> None:
        """`blocks` are the parameters of each block."""
        self._blocks = blocks
        self._waiting: list[set[Layers]] = []
        self._events: list[list[Event]] = []
        self.touched: set[int] = set()
        """The parameters that have gradients in this step, by `id`."""

    def begin(self, deliveries: Mapping[Layers, Iterable[int]]) -> None:
        """Start a step in which these segments deliver gradients of these blocks."""
        self._waiting = [set() for _ in self._blocks]
        for layers, blocks in deliveries.items():
            for block in blocks:
                self._waiting[block].add(layers)
        self._events = [[] for _ in self._blocks]
        self.touched = set()

    def has_gradient(self, block: int) -> bool:
        """Return whether part of the block's gradient came earlier in this step."""
        return any(id(p) in self.touched for p in self._blocks[block])

    def events_of(self, block: int) -> list[Event]:
        """Return the events after which the block's gradient so far is on the host."""
        return self._events[block]

    def note(
        self, layers: Layers, blocks: Iterable[int], event: Event, touched: set[int]
    ) -> list[int]:
        """Take note of a delivery; return the blocks of which it is the last one."""
        self.touched |= touched
        complete = []
        for block in blocks:
            self._events[block].append(event)
            self._waiting[block].discard(layers)
            if not self._waiting[block]:
                complete.append(block)
        return complete

    def order(self, deliveries: Mapping[Layers, Iterable[int]]) -> list[int]:
        """Return the blocks in the order in which they will be complete; call after `begin`."""
        waiting = [set(layers) for layers in self._waiting]
        order = []
        for layers, blocks in deliveries.items():
            for block in blocks:
                waiting[block].discard(layers)
                if not waiting[block]:
                    order.append(block)
        return order
