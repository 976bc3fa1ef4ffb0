"""What autograd saves waits on the host: it leaves while forward goes on, and is back in time.

Each storage is one copy each way, whatever views of it were saved. What a cheap operation makes
again from the rest of what is saved (`analysis/remade.py`) is not copied at all. What is on its way
to the host at a time is bounded by a window, and so is what is back ahead of its first use; the
window is large enough that a layer's computation covers a layer's transfers.

Hand-overs, each with the event that releases it:

| buffer | producer | consumer | released by |
|---|---|---|---|
| device storage, leaving | compute | save stream | the save's event, held before it is freed |
| host buffer | save stream | fetch stream | the save's event, awaited by the fetch |
| device buffer, back | fetch stream | compute | the fetch's event, held before first use |
| device buffer, used up | compute | whoever allocates next | order of the compute stream |
| host buffer, read | fetch stream | the pool | the fetch's event, held by compute |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from atomtrain.analysis.remade import Remade, Unpack
from atomtrain.analysis.storages import LiveStorages, uncounted
from atomtrain.swapping.device import Device
from atomtrain.swapping.host_pool import HostPool
from atomtrain.swapping.streams import Event


class _Storage:
    """One storage that waits on the host."""

    __slots__ = ("back", "fetched", "host", "saved", "users")

    def __init__(self, host: Tensor, saved: Event) -> None:
        self.host: Tensor | None = host  # [n_bytes] uint8, or `None` when nobody needs it any more
        self.saved = saved
        self.users = 0
        """Saved tensors in it that backward has not asked for yet."""
        self.back: Tensor | None = None  # [n_bytes] uint8
        self.fetched: Event | None = None
        """Of a fetch for which compute has not waited yet."""


class Away:
    """Stands for a saved tensor whose storage is on the host or will be made again, or for an
    argument of what will."""

    __slots__ = ("dtype", "offset", "parcel", "size", "storage", "stride", "used")

    def __init__(
        self,
        parcel: Parcel,
        storage: _Storage | Remade,
        tensor: Tensor,
        *,
        argument: bool = False,
    ) -> None:
        self.parcel, self.storage = parcel, storage
        self.used = argument  # an argument is a user until what is made of it is dropped
        self.dtype, self.offset = tensor.dtype, int(tensor.storage_offset())
        self.size, self.stride = tensor.shape, tensor.stride()


class _Leaving(NamedTuple):
    """A device storage that must not be freed before it is saved."""

    storage: torch.UntypedStorage
    saved: Event


class Offload:
    """The way to the host and back. Used by compute only: the caller's thread, and in backward
    autograd's."""

    def __init__(self, device: Device, pool: HostPool, window_bytes: int) -> None:
        """At most `window_bytes` are leaving at a time, or back ahead of their use."""
        self._device, self._pool, self._window_bytes = device, pool, window_bytes
        self._leaving: deque[_Leaving] = deque()
        self._leaving_bytes = 0
        self._coming: deque[_Storage] = deque()
        self._ahead_bytes = 0

    def parcel(self) -> Parcel:
        """Return what takes the saved tensors of one graph."""
        return Parcel(self)

    def send(self, tensor: Tensor) -> _Storage:
        """Begin to copy a tensor's storage to the host."""
        storage = tensor.untyped_storage()
        n_bytes = storage.nbytes()
        while self._leaving and self._leaving_bytes + n_bytes > self._window_bytes:
            self._let_go()
        host = self._pool.take(n_bytes)
        # The job lets go of the storage before its event says that it is done.
        last = [storage]
        job = self._copy_out(host, last)
        saved = self._device.save.submit(job, [self._device.mark()])
        self._leaving.append(_Leaving(storage, saved))
        self._leaving_bytes += n_bytes
        return _Storage(host, saved)

    def turn(self, parcels: Sequence[Parcel]) -> None:
        """Begin to bring back what was sent, in the order of the parcels."""
        self._coming.extend(s for parcel in parcels for s in parcel.order())
        self._advance()

    def use(self, storage: _Storage) -> Tensor:
        """Return a storage's bytes on the device; compute waits until they are there."""
        if storage.back is None:
            self._fetch(storage)
        back = storage.back
        assert back is not None
        if storage.fetched is not None:
            self._arrived(storage)
        return back

    def used(self, storage: _Storage) -> None:
        """Free a storage's device buffer (its last view may outlive this), and bring the next."""
        if not storage.users:
            storage.back = None
        self._advance()

    def forget(self, storage: _Storage) -> None:
        """Free a storage on device and host."""
        if storage.fetched is not None:
            self._arrived(storage)
        storage.back = None
        if storage.host is not None:
            self._pool.give(storage.host)
            storage.host = None

    def drain(self) -> None:
        """Let go of what is still leaving; compute waits for it."""
        while self._leaving:
            self._let_go()

    def _advance(self) -> None:
        while self._coming:
            storage = self._coming[0]
            if storage.host is not None and storage.back is None and storage.users:
                n_bytes = storage.host.numel()
                if self._ahead_bytes and self._ahead_bytes + n_bytes > self._window_bytes:
                    return
                self._fetch(storage)
            self._coming.popleft()

    def _fetch(self, storage: _Storage) -> None:
        host = storage.host
        assert host is not None
        back = self._device.empty((host.numel(),), torch.uint8)
        # The memory may have served compute a moment ago, so the copy waits for compute too.
        after = [self._device.mark(), storage.saved]
        storage.fetched = self._device.fetch.submit(self._copy_in([back], host), after)
        storage.back = back
        self._ahead_bytes += host.numel()

    def _arrived(self, storage: _Storage) -> None:
        assert storage.fetched is not None
        assert storage.back is not None
        self._device.hold(storage.fetched)
        storage.fetched = None
        self._ahead_bytes -= storage.back.numel()

    def _let_go(self) -> None:
        storage, saved = self._leaving.popleft()
        self._device.hold(saved)
        self._leaving_bytes -= storage.nbytes()

    def _copy_out(self, host: Tensor, last: list[torch.UntypedStorage]) -> Callable[[], None]:
        def copy() -> None:
            flat = torch.empty(0, dtype=torch.uint8, device=last[0].device)
            flat.set_(last.pop())
            self._device.copy_out(host, flat)

        return copy

    def _copy_in(self, last: list[Tensor], host: Tensor) -> Callable[[], None]:
        return lambda: self._device.copy_in(last.pop(), host)


class Parcel:
    """What one graph has on the host."""

    def __init__(self, offload: Offload) -> None:
        self._offload = offload
        self._known = LiveStorages[_Storage]()
        self._here = LiveStorages[_Storage | Remade]()
        """What the layer that runs has saved. Only from this is anything made again, so that each
        layer's backward needs what was predicted for the layer alone."""
        self._packed: list[_Storage] = []

    def begin_layer(self) -> None:
        """Take note that the next layer's operations follow."""
        self._here = LiveStorages()

    def find(self, tensor: Tensor) -> Away | None:
        """Return what stands for a tensor that the layer has saved already."""
        storage = self._here.get(tensor)
        return None if storage is None else Away(self, storage, tensor, argument=True)

    def pack(self, tensor: Tensor, recipe: Callable[[Tensor], Remade | None]) -> Away | Tensor:
        """Send a tensor that autograd saves, unless its storage has been sent already, or there is
        a `recipe` by which it is made again."""
        storage = self._here.get(tensor) or self._known.get(tensor)
        if storage is None:
            if not tensor.untyped_storage().nbytes():
                return tensor.data
            storage = recipe(tensor)
            if storage is not None:
                for argument in _arguments(storage):
                    argument.users += 1
            else:
                storage = self._offload.send(tensor)
                self._known.put(tensor, storage)
        self._here.put(tensor, storage)
        storage.users += 1
        self._note(storage)
        return Away(self, storage, tensor)

    def unpack(self, away: Away, unpack: Unpack) -> Tensor:
        """Return a saved tensor; `unpack` finds what it is made from, if it is made again."""
        storage = away.storage
        if isinstance(storage, Remade):
            back = storage.making.result(storage.index, unpack)
        else:
            back = self._offload.use(storage)
        with uncounted():
            view = torch.empty(0, dtype=away.dtype, device=back.device)
            view.set_(back.untyped_storage(), away.offset, away.size, away.stride)
        if not away.used:
            away.used = True
            storage.users -= 1
        self._release(storage)
        return view

    def order(self) -> list[_Storage]:
        """Return the storages in the order in which backward first needs them.

        It goes through forward's operations from the last one.
        """
        return list(dict.fromkeys(reversed(self._packed)))

    def close(self) -> None:
        """Free everything; backward is over."""
        for storage in self.order():
            self._offload.forget(storage)
        self._packed.clear()

    def _note(self, storage: _Storage | Remade) -> None:
        """Note what is needed where backward uses a storage."""
        needed: dict[_Storage | Remade, None] = {}
        _add_needed(storage, needed)
        self._packed.extend(one for one in reversed(needed) if isinstance(one, _Storage))

    def _release(self, storage: _Storage | Remade) -> None:
        """Free on the device what nobody uses any more, and bring the next."""
        if isinstance(storage, _Storage):
            self._offload.used(storage)
        elif not storage.users and storage.drop():
            for argument in _arguments(storage):
                argument.users -= 1
                self._release(argument)


def _add_needed(storage: _Storage | Remade, needed: dict[_Storage | Remade, None]) -> None:
    """Add a storage and all that it is made from, each once, last ones first."""
    if storage not in needed:
        needed[storage] = None
        if isinstance(storage, Remade):
            for argument in reversed(_arguments(storage)):
                _add_needed(argument, needed)


def _arguments(remade: Remade) -> list[_Storage | Remade]:
    """Return the storages among the arguments that are not in a place of their own."""
    return [at.storage for at in remade.making.arguments() if isinstance(at, Away)]
