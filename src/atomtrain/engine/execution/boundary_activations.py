"""What travels between segments: values upwards, their gradients downwards, for all micro-batches.

Hand-overs, each with the event that releases it:

| buffer | producer | consumer | released by |
|---|---|---|---|
| device tensor, saved | compute | save stream | the save's event, held before it is freed |
| host buffer | save stream | fetch stream | the save's event, awaited by the fetch |
| device tensor, fetched | fetch stream | compute | the fetch's event, held before first use |

What visits take comes to the device one micro-batch ahead. Values stay there across a forward cut;
they are saved where backward begins a segment, since it starts again from there. While the last
micro-batch of a visit computes, the first one of the next visit comes, so no visit begins by
waiting for the link; but only if it takes no more than what came ahead within the visit. So much is
counted in the memory of each visit, and its last micro-batch has no use for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atomtrain.analysis.costs.storages import (
    is_contiguous,
    is_dense,
    placed,
    placed_bytes,
    span_bytes,
    span_of,
)
from atomtrain.analysis.layers.chain import Chain, Layer
from atomtrain.engine.devices.device import Device
from atomtrain.engine.devices.host_memory import HostPool
from atomtrain.engine.devices.streams import Event, Job
from atomtrain.planning.cost.timeline import label_of
from atomtrain.planning.plan.plan import Plan
from atomtrain.planning.plan.shape import Boundary, Layers, Phase, Visit


@dataclass(slots=True)
class _Held:
    """One value of one micro-batch, on the device, on the host, or on both."""

    device: Tensor | None = None
    host: Any = None
    given: bool = False
    """Whether it is the caller's: a part of a larger tensor, which may be all the data that there
    are, is brought without what lies between its rows."""
    pooled: Tensor | None = None
    """The host buffer behind `host`, if it goes back to the pool."""
    saved: Event | None = None
    fetched: Event | None = None
    """Of all that came in the same job."""
    way: _Way | None = None
    """How `host` comes to the device: found out once, since most values come for many visits."""


class _Way(NamedTuple):
    """How a value on the host comes to the device."""

    n_bytes: int
    alike: bool
    """Whether a new tensor of its shape lies in memory as it does."""


class Saved(NamedTuple):
    """What came to the host."""

    value: Tensor
    buffer: Tensor
    """Its memory, which goes back to the pool."""
    event: Event
    """Done when the value is there."""


class Outbox:
    """Device tensors on their way to the host that nothing else needs: at most one is alive."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._leaving: list[tuple[Tensor, Event]] = []

    def put(self, tensor: Tensor, saved: Event) -> None:
        """Hold a tensor until its save is done; compute waits for the one before."""
        self.drain()
        self._leaving.append((tensor, saved))

    def drain(self) -> None:
        """Let go of what is left; compute waits for its save."""
        for _, event in self._leaving:
            self._device.hold(event)
        self._leaving.clear()


class BoundaryActivations:
    """Values (or gradients) by micro-batch and name. Used by the computing thread only."""

    def __init__(self, device: Device, pool: HostPool, outbox: Outbox) -> None:
        self._device, self._pool, self._outbox = device, pool, outbox
        self._held: dict[tuple[int, str], _Held] = {}

    def __contains__(self, key: tuple[int, str]) -> bool:
        return key in self._held

    def put_input(self, micro_batch: int, name: str, value: Any) -> None:
        """Hold a micro-batch's input: a host tensor, or something that is not a tensor."""
        self._held[micro_batch, name] = _Held(host=value, given=True)

    def put_host(self, micro_batch: int, name: str, value: Tensor, pooled: Tensor) -> None:
        """Hold what a layer on the host produced, in a buffer of the pool."""
        self._held[micro_batch, name] = _Held(host=value, pooled=pooled)

    def hand_over(self, micro_batch: int, name: str) -> Saved | None:
        """Give away what was saved to the host, with its buffer; `None` if there is nothing."""
        held = self._held.pop((micro_batch, name), None)
        if held is None:
            return None
        assert held.pooled is not None
        assert held.saved is not None
        return Saved(held.host, held.pooled, held.saved)

    def put(self, micro_batch: int, name: str, value: Tensor, *, keep: bool, save: bool) -> None:
        """Hold what a segment produced.

        Args:
            micro_batch: Which one.
            name: The value's name.
            value: On the device.
            keep: Leave it on the device for the next segment.
            save: Copy it to the host, for later segments or for backward.
        """
        if value.requires_grad:
            value = value.detach()
        held = _Held()
        if self._device.one_memory:
            held.host = held.device = value
            self._held[micro_batch, name] = held
            return
        if save:
            held.pooled = self._pool.take(placed_bytes(value))
            held.host = placed(held.pooled, value)
            # The job lets go of the device tensor before its event says that it is done: whoever
            # waits for the event counts on the memory.
            last = [_to_copy(value)]
            host = _to_copy(held.host)
            held.saved = self._device.save.submit(
                lambda: self._device.copy_out(host, last.pop()), [self._device.mark()]
            )
            if not keep:
                self._outbox.put(value, held.saved)
        if keep:
            held.device = value
        self._held[micro_batch, name] = held

    def away_bytes(self, micro_batch: int, names: Iterable[str]) -> int:
        """Return the bytes of those values that are on the host only."""
        return sum([_way_of(held).n_bytes for held in self._away(micro_batch, names)])

    def prefetch(self, micro_batch: int, names: Iterable[str], label: str | None = None) -> int:
        """Begin to bring values to the device, in one job; return their bytes. `label` names it in
        traces."""
        n_bytes = 0
        coming, copies = list[_Held](), list[tuple[Tensor, Tensor]]()
        # The memory may have served compute a moment ago, so the copies wait for compute too.
        after = list[Event]()
        for held in self._away(micro_batch, names):
            way = _way_of(held)
            n_bytes += way.n_bytes
            if self._device.one_memory:
                held.device = held.host
                continue
            source = held.host
            if way.alike:
                target = brought = self._device.empty(source.shape, source.dtype)
            else:
                memory = self._device.empty((placed_bytes(source),), torch.uint8)
                brought = placed(memory, source)
                source, target = _to_copy(source), _to_copy(brought)
            copies.append((target, source))
            if held.saved is not None:
                after.append(held.saved)
            held.device = brought
            coming.append(held)
        if coming:
            after.append(self._device.mark())
            fetched = self._device.fetch.submit(self._copy_in(copies), after, label)
            for held in coming:
                held.fetched = fetched
        return n_bytes

    def _away(self, micro_batch: int, names: Iterable[str]) -> list[_Held]:
        """Return the values that are on the host only."""
        found = []
        for name in names:
            held = self._held.get((micro_batch, name))
            if held is not None and held.device is None and isinstance(held.host, Tensor):
                found.append(held)
        return found

    def take(self, micro_batch: int, name: str) -> Any:
        """Return a value on the device, detached; compute waits until it is there."""
        held = self._held[micro_batch, name]
        if held.device is None and isinstance(held.host, Tensor):
            self.prefetch(micro_batch, [name])
        if held.device is None:
            return held.host
        if held.fetched is not None:
            self._device.hold(held.fetched)
            held.fetched = None
        return held.device

    def drop(self, micro_batch: int, names: Iterable[str]) -> None:
        """Free the device copies; host copies stay."""
        for name in names:
            held = self._held.get((micro_batch, name))
            if held is not None:
                self._drop(held)

    def _drop(self, held: _Held) -> None:
        if held.device is not None:
            for event in (held.saved, held.fetched):  # fetched: brought, and never taken
                if event is not None:
                    self._device.hold(event)
            held.device = held.fetched = None

    def forget(self, micro_batch: int, names: Iterable[str]) -> None:
        """Free device and host copies: nobody will read them again in this step."""
        for name in names:
            held = self._held.pop((micro_batch, name), None)
            if held is None:
                continue
            self._drop(held)
            if held.pooled is not None:
                # All copies out of it are done: compute has held their events.
                self._pool.give(held.pooled)

    def clear(self) -> None:
        """Forget everything; at the end of a step."""
        self._outbox.drain()
        for micro_batch, name in list(self._held):
            self.forget(micro_batch, [name])

    def _copy_in(self, copies: Sequence[tuple[Tensor, Tensor]]) -> Job:
        def copy() -> None:
            for target, source in copies:
                self._device.copy_in(target, source)

        return copy


def _to_copy(value: Tensor) -> Tensor:
    """Return what is copied of a value, so that its copy has the same strides."""
    return value if is_dense(value) else span_of(value)


def _way_of(held: _Held) -> _Way:
    if held.way is None:
        held.way = _way(held.host, given=held.given)
    return held.way


def _way(value: Tensor, *, given: bool) -> _Way:
    n_bytes = span_bytes(value)
    if given and n_bytes > value.nbytes:  # without the gaps between its rows
        return _Way(value.nbytes, alike=True)
    alike = placed_bytes(value) == value.nbytes and is_contiguous(value)
    return _Way(n_bytes, alike)


class Wanted(NamedTuple):
    """What a visit takes of each micro-batch."""

    values: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    label: str | None = None
    """Names the transfers in traces; `None` is what compute does when they are submitted."""


NOTHING = Wanted()


def wanted_by(chain: Chain, visit: Visit) -> Wanted:
    """Return what a visit takes."""
    reads, writes = chain.reads(*visit.layers), chain.writes(*visit.layers)
    forward = visit.phase in (Phase.FORWARD, Phase.EVALUATE)
    return Wanted(
        values=() if visit.finds else reads,
        # Gradients of values that pass this segment by stay where they are.
        gradients=() if forward else (*writes, *reads),
        label=label_of(visit),
    )


class ActivationPrefetch:
    """Brings values and gradients of micro-batches. Used by the computing thread only."""

    def __init__(self, values: BoundaryActivations, gradients: BoundaryActivations) -> None:
        self._values, self._gradients = values, gradients
        self._now = self._next = NOTHING
        self._count = self._most_ahead_bytes = 0

    def begin(self, now: Wanted, following: Wanted, count: int) -> None:
        """Start a visit of `count` micro-batches; `following` is what the next visit takes."""
        self._now, self._next, self._count = now, following, count
        self._most_ahead_bytes = 0

    def take(self, micro_batch: int) -> dict[str, Any]:
        """Return a micro-batch's values on the device by name, and begin to bring the next one's;
        compute waits until they are there."""
        if not micro_batch:  # what is not there yet; of further ones it was brought below
            self._bring(0, self._now)
        taken = {name: self._values.take(micro_batch, name) for name in self._now.values}
        if micro_batch + 1 < self._count:
            ahead_bytes = self._bring(micro_batch + 1, self._now)
            self._most_ahead_bytes = max(self._most_ahead_bytes, ahead_bytes)
        elif self._away_bytes(0, self._next) <= self._most_ahead_bytes:
            self._bring(0, self._next)
        return taken

    def _bring(self, micro_batch: int, wanted: Wanted) -> int:
        """Begin to bring what is not on the device; return how many bytes that are."""
        return self._values.prefetch(
            micro_batch, wanted.values, wanted.label
        ) + self._gradients.prefetch(micro_batch, wanted.gradients, wanted.label)

    def _away_bytes(self, micro_batch: int, wanted: Wanted) -> int:
        return self._values.away_bytes(micro_batch, wanted.values) + self._gradients.away_bytes(
            micro_batch, wanted.gradients
        )


class Route(NamedTuple):
    """What a forward visit does with values."""

    outputs: tuple[str, ...]
    """Values that it hands on, in the order of writing; the loss may be among them."""
    keep: frozenset[str]
    """Those that stay on the device for the next visit."""
    save: frozenset[str]
    """Those that go to the host."""
    last_read: frozenset[str]
    """Values that it reads and nobody will read again in this step, forward or backward."""


def forward_routes(chain: Chain, visits: Sequence[Visit], boundary: Boundary) -> dict[int, Route]:
    """Return the route of each visit that runs forward only, by its index."""
    going = (Phase.FORWARD, Phase.EVALUATE)
    upwards = [v.layers for v in visits if v.phase is not Phase.BACKWARD]
    again: set[str] = set()  # what backward starts from
    for visit in visits:
        if visit.phase is Phase.BACKWARD and not visit.finds:
            again.update(chain.reads(*visit.layers))
    routes = {}
    for index, visit in enumerate(visits):
        if visit.phase not in going:
            continue
        start, stop = visit.layers
        later = [set(chain.reads(*layers)) for layers in upwards[index + 1 :]]
        following = later[0] if later else set()
        beyond = set[str]().union(*later[1:])
        leaves = {*chain.writes(start, stop), *again}
        outputs = tuple(
            name for layer in chain.layers[start:stop] for name in layer.writes if name in leaves
        )
        keep = frozenset(outputs) & following if boundary == "device" else frozenset()
        save = frozenset(outputs) & ((following | beyond | again) - (keep - beyond - again))
        finished = frozenset(chain.reads(start, stop)) - following - beyond - again
        routes[index] = Route(outputs, keep, save, finished - frozenset(chain.inputs))
    return routes


class Link(NamedTuple):
    """One layer of a segment."""

    number: int
    layer: Layer
    spent: tuple[str, ...]
    """Values that nobody needs after it."""


class Links:
    """The layers of segments, found out once each."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._known: dict[tuple[Layers, tuple[str, ...]], list[Link]] = {}

    def of(self, layers: Layers, wanted: tuple[str, ...]) -> list[Link]:
        """Return the layers of a segment of which these values are wanted."""
        found = self._known.get((layers, wanted))
        if found is None:
            found = self._known[layers, wanted] = []
            start, stop = layers
            values = set(self._chain.reads(start, stop))
            for number in range(start, stop):
                layer = self._chain.layers[number]
                values.update(layer.writes)
                later = self._chain.reads(number + 1, stop) if number + 1 < stop else ()
                needed = {*wanted, *later}
                found.append(Link(number, layer, tuple(values - needed)))
                values &= needed
        return found


class Pass:
    """The visits of a step or of an evaluation, and where their values come from and go."""

    def __init__(self, chain: Chain, visits: Sequence[Visit], plan: Plan) -> None:
        self.visits = visits
        self.routes = forward_routes(chain, visits, plan.boundary)
        """Of forward visits, by index."""
        self.wanted = [*(wanted_by(chain, visit) for visit in visits), NOTHING]
        """What each visit takes, and nothing after the last one."""
        self.found = [visit.layers for visit in visits if visit.finds]
        """The segments whose graphs wait, in backward's order."""
