"""What travels between segments: values upwards, their gradients downwards, for all micro-batches.

Hand-overs, each with the event that releases it:

| buffer | producer | consumer | released by |
|---|---|---|---|
| device tensor, saved | compute | save stream | the save's event, held before it is freed |
| host buffer | save stream | fetch stream | the save's event, awaited by the fetch |
| device tensor, fetched | fetch stream | compute | the fetch's event, held before first use |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atomtrain.analysis.costs.storages import is_dense
from atomtrain.engine.devices.device import Device
from atomtrain.engine.devices.host_memory import HostPool
from atomtrain.engine.devices.streams import Event
from atomtrain.engine.state.store import in_layout_of, view_of


@dataclass
class _Held:
    """One value of one micro-batch, on the device, on the host, or on both."""

    device: Tensor | None = None
    host: Any = None
    pooled: Tensor | None = None
    """The host buffer behind `host`, if it goes back to the pool."""
    saved: Event | None = None
    fetched: Event | None = None


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
        """Hold a micro-batch's input: a host tensor, or something that is no tensor."""
        self._held[micro_batch, name] = _Held(host=value)

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
        value = value.detach()
        held = _Held()
        if self._device.one_memory:
            held.host = held.device = value
            self._held[micro_batch, name] = held
            return
        if save:
            source = value if is_dense(value) else value.contiguous()
            held.pooled = self._pool.take(source.nbytes)
            held.host = host = view_of(held.pooled, 0, source)
            # The job lets go of the device tensor before its event says that it is done: whoever
            # waits for the event counts on the memory.
            last = [source]
            held.saved = self._device.save.submit(
                lambda: self._device.copy_out(host, last.pop()), [self._device.mark()]
            )
            if not keep or source is not value:
                self._outbox.put(source, held.saved)
        if keep:
            held.device = value
        self._held[micro_batch, name] = held

    def away_bytes(self, micro_batch: int, names: Iterable[str]) -> int:
        """Return the bytes of those values that are on the host only."""
        return sum(held.host.nbytes for held in self._away(micro_batch, names))

    def prefetch(self, micro_batch: int, names: Iterable[str], label: str | None = None) -> None:
        """Begin to bring values to the device; `label` names that in traces."""
        for held in self._away(micro_batch, names):
            if self._device.one_memory:
                held.device = held.host
                continue
            flat = self._device.empty((held.host.numel(),), held.host.dtype)
            target = in_layout_of(flat, held.host)
            # The memory may have served compute a moment ago, so the copy waits for compute too.
            after = [self._device.mark()]
            if held.saved is not None:
                after.append(held.saved)
            source = held.host
            held.fetched = self._device.fetch.submit(self._copy_in(target, source), after, label)
            held.device = target

    def _away(self, micro_batch: int, names: Iterable[str]) -> Iterator[_Held]:
        """Yield the values that are on the host only."""
        for name in names:
            held = self._held.get((micro_batch, name))
            if held is not None and held.device is None and isinstance(held.host, Tensor):
                yield held

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
            if held is not None and held.device is not None:
                for event in (held.saved, held.fetched):  # fetched: brought, and never taken
                    if event is not None:
                        self._device.hold(event)
                held.device = held.fetched = None

    def forget(self, micro_batch: int, names: Iterable[str]) -> None:
        """Free device and host copies: nobody will read them again in this step."""
        names = list(names)
        self.drop(micro_batch, names)
        for name in names:
            held = self._held.pop((micro_batch, name), None)
            if held is not None and held.pooled is not None:
                # All copies out of it are done: compute has held their events.
                self._pool.give(held.pooled)

    def clear(self) -> None:
        """Forget everything; at the end of a step."""
        self._outbox.drain()
        for micro_batch, name in list(self._held):
            self.forget(micro_batch, [name])

    def _copy_in(self, target: Tensor, source: Tensor) -> Any:
        return lambda: self._device.copy_in(target, source)


def leaf_of(value: Any, requires_grad: bool) -> Any:
    """Return a tensor as a new leaf of the graph; anything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.detach().requires_grad_(requires_grad)
    return value
