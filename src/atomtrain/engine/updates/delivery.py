"""What takes an executor's gradients: the updates, or one device's share of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from torch import nn

from atomtrain.engine.devices.streams import Event, Stream
from atomtrain.engine.updates.updates import Updates
from atomtrain.planning.plan.shape import Layers


class Delivery(Protocol):
    """Where an executor delivers its gradients: to the updates, or to a sum over devices."""

    @property
    def whole(self) -> Updates:
        """The updates behind it."""
        ...

    @property
    def on_device(self) -> frozenset[int]:
        """Blocks that are updated on the device, of which nothing is delivered."""
        ...

    @property
    def updated(self) -> Sequence[Event]:
        """Of each block, done when its last update is."""
        ...

    @property
    def stream(self) -> Stream:
        """Where blocks are updated."""
        ...

    @property
    def touched(self) -> set[int]:
        """The parameters that have gradients in this step, by `id`; jobs may add to it."""
        ...

    def begin_step(self, deliveries: Mapping[Layers, Iterable[int]]) -> None:
        """Start a step in which these segments deliver gradients of these blocks."""
        ...

    def members(self, block: int) -> Sequence[nn.Parameter]:
        """Return the parameters of a block."""
        ...

    def has_gradient(self, block: int) -> bool:
        """Return whether part of the block's gradient came to the host earlier in this step."""
        ...

    def events_of(self, block: int) -> Sequence[Event]:
        """Return the events after which the block's gradient so far is on the host."""
        ...

    def arrived(
        self, layers: Layers, blocks: Iterable[int], event: Event, touched: set[int]
    ) -> None:
        """Take note that a segment's gradients are on the host once `event` is done."""
        ...

    def finish_step(self) -> None:
        """All has been delivered; never blocks."""
        ...

    def scale_of_loss(self) -> float:
        """Return by what this step's loss is multiplied."""
        ...
