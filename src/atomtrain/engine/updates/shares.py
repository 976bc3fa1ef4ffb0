"""Gradients of several devices: each delivers its share, and the shares are added on the host.

The order is that of the devices, so the sum is a pure function of how the micro-batches are
divided: first all of the first device's micro-batches, added up as on a single device, then the
second device's sum is added to it, and so on. A block is added when its last share has come, and
updated then.

| buffer | producer | consumer | released by |
|---|---|---|---|
| a share's host gradients | the device's unload stream | update stream, which adds | the block's \
`updated` event: no device has the block again before |

`Delivery` is what takes an executor's gradients: the updates, or one device's share of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from torch import nn

from atomtrain.engine.devices.streams import Event, Stream
from atomtrain.engine.state.gradients import GradientTracker
from atomtrain.engine.state.store import HostStore
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


class Share:
    """Takes one device's gradients; a `Delivery`. Used by the thread that drives the device."""

    def __init__(self, sums: Sums, store: HostStore) -> None:
        """`store` has the gradients of this device."""
        self._sums, self.store = sums, store
        self._tracker = GradientTracker(sums.whole.blocks)

    @property
    def whole(self) -> Updates:
        """The updates that all devices share."""
        return self._sums.whole

    @property
    def on_device(self) -> frozenset[int]:
        """Nothing: devices would have to exchange what they update."""
        return self.whole.on_device

    @property
    def updated(self) -> Sequence[Event]:
        """Of each block, done when its last update is."""
        return self.whole.updated

    @property
    def stream(self) -> Stream:
        """Where blocks are added and updated."""
        return self.whole.stream

    @property
    def touched(self) -> set[int]:
        """The parameters that have gradients on this device in this step, by `id`."""
        return self._tracker.touched

    def begin_step(self, deliveries: Mapping[Layers, Iterable[int]]) -> None:
        """Start a step; all shares deliver the same."""
        self._tracker.begin(deliveries)
        self._sums.expect(self, deliveries)

    def members(self, block: int) -> Sequence[nn.Parameter]:
        """Return the parameters of a block."""
        return self.whole.members(block)

    def has_gradient(self, block: int) -> bool:
        """Return whether part of the device's gradient came to the host earlier in this step."""
        return self._tracker.has_gradient(block)

    def events_of(self, block: int) -> Sequence[Event]:
        """Return the events after which the device's gradient so far is on the host."""
        return self._tracker.events_of(block)

    def arrived(
        self, layers: Layers, blocks: Iterable[int], event: Event, touched: set[int]
    ) -> None:
        """Take note that a segment's gradients are on the host once `event` is done."""
        for block in self._tracker.note(layers, blocks, event, touched):
            self._sums.complete(block)

    def finish_step(self) -> None:
        """Do nothing: the step is over when all shares have come."""

    def scale_of_loss(self) -> float:
        """Return by what this step's loss is multiplied; waits for the step before."""
        return self.whole.scale_of_loss()


class Sums:
    """Adds the shares of a step, block by block, and has the blocks updated."""

    def __init__(self, whole: Updates, store: HostStore) -> None:
        """`store` is that of the first device, where the sums are made and updates read them."""
        self.whole, self._store = whole, store
        self._shares: list[Share] = []
        self._deliveries: Mapping[Layers, Iterable[int]] = {}
        self._missing: list[int] = []
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Start a step; then each share that takes part begins it, in the order of devices."""
        self._shares = []

    def expect(self, share: Share, deliveries: Mapping[Layers, Iterable[int]]) -> None:
        """Count on a share."""
        if not self._shares:
            self.whole.begin_step(deliveries)
            self._deliveries = deliveries
        self._shares.append(share)
        self._missing = [len(self._shares)] * len(self.whole.blocks)

    def complete(self, block: int) -> None:
        """Take note that one share of a block is complete; on any device's thread."""
        with self._lock:
            self._missing[block] -= 1
            if self._missing[block]:
                return
            shares = list(self._shares)
            after = [event for share in shares for event in share.events_of(block)]
            touched = {
                key
                for share in shares
                for key in (id(p) for p in self.whole.members(block))
                if key in share.touched
            }
            event = self.whole.stream.submit(self._add_job(block, shares), after)
            for layers, blocks in self._deliveries.items():
                if block in blocks:
                    self.whole.arrived(layers, [block], event, touched)

    def _add_job(self, block: int, shares: Sequence[Share]) -> Callable[[], None]:
        members, touched = self.whole.members(block), self.whole.touched
        # Of this step: the next one, which may have begun by then, has sets of its own.
        given = [(share.store, share.touched) for share in shares]

        def add() -> None:
            for parameter in members:
                key, total = id(parameter), None
                for store, reached in given:
                    if key not in reached:
                        continue
                    gradient = store.gradient(parameter)
                    if total is not None:
                        total.add_(gradient)
                        continue
                    total = self._store.gradient(parameter)
                    if total is not gradient:
                        # Moved, not added to zero: 0.0 + -0.0 is 0.0.
                        total.copy_(gradient)
                    touched.add(key)

        return add
