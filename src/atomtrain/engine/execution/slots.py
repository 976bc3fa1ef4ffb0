"""Device slots and gradient buffers: segments come, are used as views, and go.

Hand-overs of a slot, each with the event that releases it:

| buffer | producer | consumer | released by |
|---|---|---|---|
| slot | load stream | compute | `Device.mark` after its last visit, awaited by the next load |
| host parameters | update stream | load stream | the blocks' `updated` events |
| gradient buffer | compute | unload stream | the unload's event, held by compute before it moves \
the first gradient there, and awaited by a load of what was added before |
| host gradients | unload stream | update stream | the unload's event |
| a staging buffer of host gradients | update stream | unload stream | the `updated` events of the \
blocks that were in it |

A resident block (`engine/state/residents.py`) comes with the first segment that uses it, or in
pieces with all segments up to that one, unless it is updated on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from atomtrain.analysis.layers.chain import Chain
from atomtrain.engine.devices.device import Device
from atomtrain.engine.devices.streams import Event, finished
from atomtrain.engine.execution.views import Views
from atomtrain.engine.state.gradients import Collector
from atomtrain.engine.state.residents import Copy, Residents
from atomtrain.engine.state.store import HostStore
from atomtrain.engine.updates.device_updates import DeviceUpdates
from atomtrain.engine.updates.shares import Delivery
from atomtrain.planning.cost.timeline import label_of
from atomtrain.planning.plan.layout import STAGING_BUFFERS
from atomtrain.planning.plan.plan import Plan
from atomtrain.planning.plan.shape import Layers, Phase, Visit

Tensors = list[dict[str, Tensor]]
"""For each layer of a segment, its parameters on the device by the module's own names."""


class Slots:
    """Loads segments ahead of their visits and unloads their gradients."""

    def __init__(
        self, chain: Chain, plan: Plan, store: HostStore, device: Device, updates: Delivery
    ) -> None:
        """Allocate; call inside `Device.computing`."""
        self._chain, self._store, self._layout = chain, store, store.layout
        self._device, self._updates = device, updates
        self.collector = Collector(device.hold)
        self._first = plan.host_layers
        self._residents = Residents(
            chain,
            plan.resident_blocks,
            store,
            device,
            self.collector,
            self._first,
            plan.device_blocks,
        )
        self.there = DeviceUpdates(plan.device_blocks, self._residents, device, updates.whole)
        """Updates on the device."""
        slot, gradient = (plan.slot_bytes,), (plan.gradient_bytes,)
        one = device.one_memory
        self._slots = [
            store.parameters if one else device.empty(slot, torch.uint8) for _ in range(plan.slots)
        ]
        self._gradients = [
            store.gradients if one else device.empty(gradient, torch.uint8)
            for _ in range(plan.gradient_buffers)
        ]
        self._free = [finished() for _ in self._gradients]
        self._spent: list[list[Event]] = [[] for _ in range(STAGING_BUFFERS)]
        self._views = Views(
            chain,
            self._layout,
            self._residents,
            self.collector,
            slots=self._slots,
            gradients=self._gradients,
            one_memory=one,
        )
        self._visits: Sequence[Visit] = ()
        self._loads: dict[int, Event] = {}
        self._next = 0

    @property
    def storages(self) -> frozenset[int]:
        """Keys of the storages in which parameters lie that stay in place during a step."""
        return self._residents.storages

    def slot_of(self, visit: Visit) -> Tensor:
        """Return the slot in which a visit has its segment."""
        return self._slots[visit.slot]

    def delivered(self, layers: Layers) -> list[int]:
        """Return the blocks whose gradients leave after the backward visit of these layers."""
        start, _ = layers
        return [
            block
            for block in self._layout.blocks_of(*layers)
            if block not in self._updates.on_device
            and (block not in self._residents or self._layout.users(block, self._first)[0] >= start)
        ]

    def begin(self, visits: Sequence[Visit]) -> None:
        """Start a pass over the segments; what the slots hold is stale."""
        self._visits, self._next = visits, 0
        self._loads = {}
        self.collector.touched.clear()
        self._advance(-1)
        self.there.begin()

    def enter(self, index: int) -> Tensors:
        """Wait until the visit's segment is in its slot; return its tensors, ready for use."""
        visit = self._visits[index]
        if index in self._loads:
            self._device.hold(self._loads.pop(index))
        if visit.gradient is not None:
            self._prepare_gradients(visit, self._leaves(visit))
        return self.tensors_in(visit.layers, visit.home)

    def tensors_in(self, layers: Layers, slot: int) -> Tensors:
        """Return a segment's tensors where it lies in a slot, as `enter` does."""
        leaves = {**self._views.leaves(layers, slot), **self._residents.leaves}
        return [
            {name: leaves[id(p)] for name, p in layer.parameters.items()}
            for layer in self._chain.layers[slice(*layers)]
        ]

    def update(self, index: int) -> None:
        """Update what is updated on the device and has its whole gradient now."""
        visit = self._visits[index]
        if visit.gradient is not None:
            self.there.completed(visit.layers, self.collector.touched)

    def leave(self, index: int) -> None:
        """Hand the slot over to the next load and the gradients to the host."""
        visit = self._visits[index]
        if visit.gradient is not None:
            if not self._store.keeps_gradients:
                for key, leaf in self._leaves(visit).items():
                    if leaf.grad is not None:
                        self._store.put_gradient(key, leaf.grad)
            self._unload_gradients(visit)
            self.collector.waiting.clear()
            self.collector.places_free.clear()  # the unload above comes after what is left
            for leaf in self._leaves(visit).values():
                leaf.grad = None
            self._residents.release(visit.layers)
        self._advance(index)

    def _advance(self, done: int) -> None:
        """Submit, in order, the loads whose slots are free once visit `done` is over."""
        free = self._device.mark()
        while self._next < len(self._visits):
            visit = self._visits[self._next]
            if visit.load:
                if visit.free_after > done:
                    return
                self._loads[self._next] = self._submit_load(visit, free)
            self._next += 1

    def _submit_load(self, visit: Visit, free: Event) -> Event:
        """Submit the load of a visit's segment to its slot, which is free after an event."""
        copies, blocks = self._arriving(visit)
        if not blocks:  # all of it is updated on the device
            return finished()
        ready = [self._updates.updated[block] for block in blocks]
        if self._store.loads is not None:
            return self._store.loads.submit(copies, ready, free, label_of(visit))
        return self._device.load.submit(self._in(copies), [free, *ready], label_of(visit))

    def _arriving(self, visit: Visit) -> tuple[list[Copy], list[int]]:
        """Return the copies that bring a visit's segment to its slot, and their blocks."""
        slot, source = self._slots[visit.slot], self._store.parameters
        copies = [
            Copy(slot[offset:][: stop - start], source[start:stop])
            for start, stop, offset in self._views.moved_pieces(visit.layers)
        ]
        blocks = [b for b in self._layout.blocks_of(*visit.layers) if b not in self._residents]
        if visit.phase is not Phase.BACKWARD:
            loads = self._residents.loads_with(visit.layers)
            copies += loads.values()
            blocks += loads
        return copies, blocks

    def _leaves(self, visit: Visit) -> dict[int, Tensor]:
        """Return the segment's parameters on the device, but resident ones, by `id`.

        They are those with which its graph was built, if it waited for backward.
        """
        return self._views.leaves(visit.layers, visit.home)

    def _prepare_gradients(self, visit: Visit, leaves: dict[int, Tensor]) -> None:
        assert visit.gradient is not None
        # Not waited for here: much is computed before the first gradient comes.
        self.collector.places_free[:] = [self._free[visit.gradient]]
        seeded = self._seed_shared(visit)
        if not self._store.keeps_gradients:
            for parameter, _ in self._views.places(visit.layers, gradients=True):
                if id(parameter) in seeded:
                    leaves[id(parameter)].grad = self._store.gradient(parameter)
            return
        for key, gradient in self._views.gradients(visit.layers, visit.gradient).items():
            if key in seeded:
                leaves[key].grad = gradient
            else:
                self.collector.waiting[key] = gradient
        self._residents.expect(visit.layers, self.collector.waiting)

    def _seed_shared(self, visit: Visit) -> set[int]:
        """Load what later layers have already added to the gradients of shared weights.

        The sum then goes on in the order in which ordinary training adds: first everything from
        the later layer, then the earlier one's micro-batches, one by one.
        """
        assert visit.gradient is not None
        layers, buffer = visit.layers, self._gradients[visit.gradient]
        seeded: set[int] = set()
        events = []
        for block in self._layout.blocks_of(*layers):
            if block in self._residents or not self._updates.has_gradient(block):
                continue
            seeded.update(id(parameter) for parameter in self._updates.members(block))
            at, _ = self._layout.gradients.block_range(block)
            start, stop = self._layout.gradient_range(block)
            wide = self._layout.gradient_factor
            copies = [
                Copy(
                    buffer[wide * p.slot_bytes :][: stop - start],
                    self._store.gradients_of(start, stop),
                )
                for p in self._views.moved_pieces(layers, gradients=True)
                if p.start_bytes == at
            ]
            free = [self._device.mark(), self._free[visit.gradient]]
            after = [*free, *self._updates.events_of(block)]
            events.append(self._device.load.submit(self._in(copies), after))
        for event in events:
            self._device.hold(event)
        return seeded

    def _unload_gradients(self, visit: Visit) -> None:
        assert visit.gradient is not None
        buffer = self._gradients[visit.gradient]
        wide = self._layout.gradient_factor
        copies = [
            Copy(self._store.gradients_of(start, stop), buffer[slot:][: stop - start])
            for start, stop, slot in (
                (wide * p.start_bytes, wide * p.stop_bytes, wide * p.slot_bytes)
                for p in self._views.moved_pieces(visit.layers, gradients=True)
            )
        ]
        leaving = self._residents.unloads_with(visit.layers)
        copies += [self._residents.unload_of(block) for block in leaving]

        delivered, staging = (
            self.delivered(visit.layers),
            self._store.places.staging.get(visit.layers),
        )
        after = [self._device.mark()]
        if staging is not None:
            after += self._spent[staging]
        event = self._device.unload.submit(self._out(copies), after) if delivered else finished()
        self._free[visit.gradient] = event
        self._updates.arrived(visit.layers, delivered, event, self.collector.touched)
        self._spend(staging, delivered)

    def _spend(self, staging: int | None, delivered: Sequence[int]) -> None:
        """Take note of what has to be done before others' gradients may come to its buffer."""
        if staging is not None:
            self._spent[staging] = [self._updates.updated[block] for block in delivered]

    def _out(self, copies: Sequence[Copy]) -> Callable[[], None]:
        def copy() -> None:
            for target, source in copies:
                self._device.copy_out(target, source)

        return copy

    def _in(self, copies: Sequence[Copy]) -> Callable[[], None]:
        def copy() -> None:
            for target, source in copies:
                self._device.copy_in(target, source)

        return copy
