"""Device slots and gradient buffers: segments come, are used as views, and go.

Hand-overs of a slot, each with the event that releases it:

| buffer | producer | consumer | released by |
|---|---|---|---|
| slot | load stream | compute | `Device.mark` after its last visit, awaited by the next load |
| host parameters | update stream | load stream | the blocks' `updated` events |
| gradient buffer | compute | unload stream | the unload's event, held by compute at its next use |
| host gradients | unload stream | update stream | the unload's event |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from atomtrain.analysis.chain import Chain
from atomtrain.planning.layout import Piece
from atomtrain.planning.plan import Plan
from atomtrain.planning.schedule import Visit
from atomtrain.swapping.device import Device
from atomtrain.swapping.store import HostStore, view_of
from atomtrain.swapping.streams import Event, finished
from atomtrain.swapping.updates import Updates

Tensors = list[dict[str, Tensor]]
"""For each layer of a segment, its parameters on the device by the module's own names."""


class Slots:
    """Loads segments ahead of their visits and unloads their gradients."""

    def __init__(
        self, chain: Chain, plan: Plan, store: HostStore, device: Device, updates: Updates
    ) -> None:
        """Allocate; call inside `Device.computing`."""
        self._chain, self._plan, self._store = chain, plan, store
        self._device, self._updates = device, updates
        shape = (plan.slot_bytes,)
        self._slots = [device.empty(shape, torch.uint8) for _ in range(plan.slots)]
        self._gradients = [device.empty(shape, torch.uint8) for _ in range(plan.gradient_buffers)]
        self._free = [finished() for _ in self._gradients]
        self._pieces = [store.layout.pieces(*self.layers(s)) for s in range(plan.segments)]
        self._leaves: dict[tuple[int, int], dict[int, Tensor]] = {}
        self._visits: Sequence[Visit] = ()
        self._loads: dict[int, Event] = {}
        self._next = 0
        self._touched: set[int] = set()
        self._waiting: dict[int, Tensor] = {}

    def layers(self, segment: int) -> tuple[int, int]:
        """Return the range of layers of a segment."""
        return self._plan.bounds[segment], self._plan.bounds[segment + 1]

    def begin(self, visits: Sequence[Visit]) -> None:
        """Start a pass over the segments; whatever the slots hold is stale."""
        self._visits, self._next = visits, 0
        self._loads = {}
        self._advance(-1)

    def enter(self, index: int) -> Tensors:
        """Wait until the visit's segment is in its slot; return its tensors, ready for use."""
        visit = self._visits[index]
        if index in self._loads:
            self._device.hold(self._loads.pop(index))
        leaves = self._leaves_of(visit.segment, visit.slot)
        if visit.gradient is not None:
            self._prepare_gradients(visit.segment, visit.gradient, leaves)
        start, stop = self.layers(visit.segment)
        return [
            {name: leaves[id(p)] for name, p in layer.parameters.items()}
            for layer in self._chain.layers[start:stop]
        ]

    def leave(self, index: int) -> None:
        """Hand the slot over to the next load and the gradients to the host."""
        visit = self._visits[index]
        if visit.gradient is not None:
            self._unload_gradients(visit.segment, visit.gradient)
            self._waiting.clear()
            for leaf in self._leaves_of(visit.segment, visit.slot).values():
                leaf.grad = None
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
        blocks = self._updates.blocks_of(*self.layers(visit.segment))
        ready = [self._updates.updated[block] for block in blocks]
        job = self._copy_in(
            self._slots[visit.slot], self._store.parameters, self._pieces[visit.segment]
        )
        return self._device.load.submit(job, [free, *ready])

    def _leaves_of(self, segment: int, slot: int) -> dict[int, Tensor]:
        """Return the segment's parameters as views of the slot, made once."""
        key = (segment, slot)
        if key not in self._leaves:
            leaves: dict[int, Tensor] = {}
            for parameter, offset in self._places(segment):
                with torch.no_grad():
                    leaf = view_of(self._slots[slot], offset, parameter)
                leaf.requires_grad_(parameter.requires_grad)
                if parameter.requires_grad:
                    leaf.register_post_accumulate_grad_hook(self._collector(id(parameter)))
                leaves[id(parameter)] = leaf
            self._leaves[key] = leaves
        return self._leaves[key]

    def _collector(self, key: int) -> Callable[[Tensor], None]:
        """Return a hook that moves a parameter's first gradient into the gradient buffer.

        Autograd adds further ones there in place. A parameter without any is never noted.
        """
        # Holds these two only: a hook that held the slots would keep them alive as a cycle.
        touched, waiting = self._touched, self._waiting

        def collect(leaf: Tensor) -> None:
            touched.add(key)
            target = waiting.pop(key, None)
            if target is not None:
                assert leaf.grad is not None
                target.copy_(leaf.grad)
                leaf.grad = target

        return collect

    def _places(self, segment: int) -> list[tuple[nn.Parameter, int]]:
        """Return the segment's parameters with their byte offsets in a slot."""
        start, stop = self.layers(segment)
        unique = {
            id(parameter): parameter
            for layer in self._chain.layers[start:stop]
            for parameter in layer.parameters.values()
        }
        places = []
        for parameter in unique.values():
            offset = self._store.layout.offsets[id(parameter)]
            for piece in self._pieces[segment]:
                if piece.start_bytes <= offset < max(piece.stop_bytes, piece.start_bytes + 1):
                    places.append((parameter, offset - piece.start_bytes + piece.slot_bytes))
                    break
            else:  # a parameter without elements at the very end of a range
                places.append((parameter, 0))
        return places

    def _prepare_gradients(self, segment: int, buffer: int, leaves: dict[int, Tensor]) -> None:
        self._touched.clear()
        self._device.hold(self._free[buffer])
        seeded = self._seed_shared(segment, buffer)
        for parameter, offset in self._places(segment):
            if not parameter.requires_grad:
                continue
            gradient = view_of(self._gradients[buffer], offset, parameter)
            if id(parameter) in seeded:
                leaves[id(parameter)].grad = gradient
            else:
                self._waiting[id(parameter)] = gradient

    def _seed_shared(self, segment: int, buffer: int) -> set[int]:
        """Load what later layers have already added to the gradients of shared weights.

        The sum then goes on in the order in which ordinary training adds: first everything from
        the later layer, then the earlier one's micro-batches, one by one.
        """
        start, stop = self.layers(segment)
        seeded: set[int] = set()
        events = []
        for block in self._updates.blocks_of(start, stop):
            members = self._updates.members(block)
            if not self._updates.has_gradient(block):
                continue
            seeded.update(id(parameter) for parameter in members)
            offset = self._store.layout.offsets[id(members[0])]
            pieces = [p for p in self._pieces[segment] if p.start_bytes == offset]
            job = self._copy_in(self._gradients[buffer], self._store.gradients, pieces)
            events.append(
                self._device.load.submit(
                    job, [self._device.mark(), *self._updates.arrivals_of(block)]
                )
            )
        for event in events:
            self._device.hold(event)
        return seeded

    def _unload_gradients(self, segment: int, buffer: int) -> None:
        pieces = self._pieces[segment]
        source, target = self._gradients[buffer], self._store.gradients

        def unload() -> None:
            for start, stop, slot in pieces:
                self._device.copy_out(target[start:stop], source[slot : slot + stop - start])

        event = self._device.unload.submit(unload, [self._device.mark()])
        self._free[buffer] = event
        blocks = self._updates.blocks_of(*self.layers(segment))
        self._updates.arrived(segment, blocks, event, self._touched)

    def _copy_in(
        self, target: Tensor, source: Tensor, pieces: Sequence[Piece]
    ) -> Callable[[], None]:
        def copy() -> None:
            for start, stop, slot in pieces:
                self._device.copy_in(target[slot : slot + stop - start], source[start:stop])

        return copy
