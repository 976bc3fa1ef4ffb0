"""What autograd saves waits on the host: it leaves while forward goes on, and is back in time.

Each storage is one copy each way, whatever views of it were saved; small ones leave and come back
together, in one job of a stream. What a cheap operation makes again from the rest of what is saved
(`analysis/costs/rematerialization.py`) is not copied at all. What is on its way to the host at a
time is bounded by a window, and so is what is back ahead of its first use; the window is large
enough that a layer's computation covers a layer's transfers.

Hand-overs, each with the event that releases it:

| buffer | producer | consumer | released by |
|---|---|---|---|
| device storages, leaving | compute | save stream | the save's event, held before they are freed |
| host buffer | save stream | fetch stream | the save's event, awaited by the fetch |
| device buffer, back | fetch stream | compute | the fetch's event, held before first use |
| device buffer, used up | compute | whoever allocates next | order of the compute stream |
| host buffer, read | fetch stream | the pool | the fetch's event, held by compute |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from atomtrain.analysis.costs.rematerialization import RematerializedStorage, Unpack
from atomtrain.analysis.costs.storages import (
    LiveStorages,
    View,
    contiguous_strides,
    seen_as,
    view_at,
    view_of,
)
from atomtrain.engine.devices.device import Device
from atomtrain.engine.devices.host_memory import HostPool
from atomtrain.engine.devices.streams import Event, Job

_LEAST_JOB_BYTES, _MOST_JOB_BYTES = 64 << 10, 4 << 20
"""Between these a job begins as soon as a share of the window waits for it. What is less than the
least takes the link less time than compute takes to hand it over."""
_JOBS_PER_WINDOW = 8
"""Copies begin while most of the window is still free."""


class Package(NamedTuple):
    """What a storage is on its way to the host and back."""

    n_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    """As which it comes back: that of the tensor that was sent, where it fills the storage."""


def package_of(tensor: Tensor) -> Package:
    """Return what a tensor's storage is on its way."""
    n_bytes, dtype = tensor.untyped_storage().nbytes(), tensor.dtype
    if n_bytes == tensor.nbytes and tensor.is_contiguous():
        return Package(n_bytes, dtype, tensor.shape)
    if n_bytes % dtype.itemsize:
        dtype = torch.uint8
    return Package(n_bytes, dtype, (n_bytes // dtype.itemsize,))


def view_in(package: Package, view: View) -> View | None:
    """Return where a tensor lies in what comes back, or `None` if it is all of that as it is."""
    comes = View(package.dtype, 0, torch.Size(package.shape), contiguous_strides(package.shape))
    return None if view == comes else view


class SentStorage:
    """One storage that waits on the host."""

    __slots__ = ("back", "fetched", "host", "n_bytes", "package", "saved", "together", "users")

    def __init__(self, host: Tensor, package: Package) -> None:
        self.host: Tensor | None = host  # [n_bytes] uint8, or `None` when nobody needs it any more
        self.package, self.n_bytes = package, package.n_bytes
        self.saved: Event | None = None
        """`None` as long as it waits for others to leave with."""
        self.together: Sequence[SentStorage] = ()
        """What left in the same job, this one too."""
        self.users = 0
        """Saved tensors in it that backward has not asked for yet."""
        self.back: Tensor | None = None
        self.fetched: Event | None = None
        """Of a fetch for which compute has not waited yet."""

    def buffer(self) -> Tensor:
        """Return the host buffer, which is still needed."""
        assert self.host is not None
        return self.host

    def to_bring(self) -> list[SentStorage]:
        """Return this one, and what else of its job is still wanted and not on the device."""
        return [
            one
            for one in self.together
            if one is self or (one.users and one.back is None and one.host is not None)
        ]


AnyStorage: TypeAlias = "SentStorage | RematerializedStorage"


class Away:
    """Stands for a saved tensor whose storage is on the host or will be made again, or for an
    argument of what will."""

    __slots__ = ("parcel", "storage", "used", "view")

    def __init__(
        self,
        parcel: Parcel,
        storage: AnyStorage,
        view: View,
        *,
        argument: bool = False,
    ) -> None:
        self.parcel, self.storage, self.view = parcel, storage, view
        self.used = argument  # an argument is a user until what is made of it is dropped

    def __del__(self) -> None:
        """Backward will not ask: autograd let go of the operation that saved this."""
        if not self.used:
            self.storage.users -= 1


class _Waiting(NamedTuple):
    """What leaves in the next job."""

    storages: list[torch.UntypedStorage]
    together: list[SentStorage]


class _Leaving(NamedTuple):
    """Device storages that must not be freed before they are saved."""

    storages: Sequence[torch.UntypedStorage]
    n_bytes: int
    saved: Event


class Offload:
    """The way to the host and back. Used by compute only: the caller's thread, and in backward
    autograd's."""

    def __init__(self, device: Device, pool: HostPool, window_bytes: int) -> None:
        """At most `window_bytes` are leaving at a time, or back ahead of their use."""
        self._device, self._pool, self._window_bytes = device, pool, window_bytes
        self.device_type = device.torch_device.type
        share = window_bytes // _JOBS_PER_WINDOW
        self._job_bytes = max(_LEAST_JOB_BYTES, min(share, _MOST_JOB_BYTES))
        self._waiting = _Waiting([], [])
        self._waiting_bytes = 0
        self._leaving: deque[_Leaving] = deque()
        self._leaving_bytes = 0
        """Of what is in both."""
        self._to_fetch: deque[SentStorage] = deque()
        self._ahead_bytes = 0
        self._held: Event | None = None
        """The fetch for which compute waited last."""
        self._room_bytes = -1
        """More comes ahead as soon as no more than this is there; -1: nothing is left to come."""

    def parcel(self, *, alone: bool = False) -> Parcel:
        """Return what takes the saved tensors of one graph, of a layer alone or of several."""
        return Parcel(self, alone)

    def send(self, tensor: Tensor, package: Package) -> SentStorage:
        """Begin to copy a tensor's storage to the host, as soon as there is enough for a job."""
        n_bytes = package.n_bytes
        if self._leaving_bytes + n_bytes > self._window_bytes:
            self._send_waiting()
            while self._leaving and self._leaving_bytes + n_bytes > self._window_bytes:
                self._let_go()
        sent = SentStorage(self._pool.take(n_bytes), package)
        self._waiting.storages.append(tensor.untyped_storage())
        self._waiting.together.append(sent)
        self._leaving_bytes += n_bytes
        self._waiting_bytes += n_bytes
        if self._waiting_bytes >= self._job_bytes:
            self._send_waiting()
        return sent

    def turn(self, parcels: Sequence[Parcel]) -> None:
        """Begin to bring back what was sent, in the order of the parcels."""
        self._send_waiting()
        for parcel in parcels:
            self._to_fetch.extend(parcel.order())
        self._advance()

    def use(self, storage: SentStorage) -> Tensor:
        """Return a storage's bytes on the device; compute waits until they are there."""
        if storage.back is None:
            self._fetch([storage])  # alone: there was no room for it in the window
        back = storage.back
        assert back is not None
        if storage.fetched is not None:
            self._arrived(storage)
        return back

    def used(self, storage: SentStorage) -> None:
        """Free a storage's device buffer (its last view may outlive this), and bring the next."""
        if not storage.users:
            storage.back = None
        if self._ahead_bytes <= self._room_bytes:
            self._advance()

    def forget(self, storages: Iterable[SentStorage]) -> None:
        """Free storages on device and host."""
        for storage in storages:
            if storage.fetched is not None:
                self._arrived(storage)
            storage.back = None
            storage.together = ()
            if storage.host is not None:
                self._pool.give(storage.host)
                storage.host = None

    def drain(self) -> None:
        """Let go of what is still leaving; compute waits for it."""
        self._send_waiting()
        while self._leaving:
            self._let_go()

    def _advance(self) -> None:
        """Begin to bring what comes next, as far as there is room for it."""
        while self._to_fetch:
            storage = self._to_fetch[0]
            if storage.users and storage.back is None and storage.host is not None:
                storages = storage.to_bring()
                n_bytes = sum([one.n_bytes for one in storages])
                self._room_bytes = max(0, self._window_bytes - n_bytes)
                if self._ahead_bytes > self._room_bytes:
                    return
                self._fetch(storages)
            self._to_fetch.popleft()
        self._room_bytes = -1

    def _send_waiting(self) -> None:
        """Begin to copy what waits, in one job."""
        if not self._waiting_bytes:
            return
        storages, together = self._waiting
        self._waiting = _Waiting([], [])
        copies = [
            (sent.buffer(), storage) for sent, storage in zip(together, storages, strict=True)
        ]
        saved = self._device.save.submit(self._copy_out(copies), [self._device.mark()])
        for sent in together:
            sent.saved, sent.together = saved, together
        self._leaving.append(_Leaving(storages, self._waiting_bytes, saved))
        self._waiting_bytes = 0

    def _fetch(self, storages: Sequence[SentStorage]) -> None:
        """Begin to bring back, in one job, storages that left in one job."""
        saved = storages[0].saved
        assert saved is not None
        copies = list[tuple[Tensor, Tensor]]()
        for one in storages:
            one.back = self._device.empty(one.package.shape, one.package.dtype)
            copies.append((one.back, one.buffer()))
            self._ahead_bytes += one.n_bytes
        # The memory may have served compute a moment ago, so the copy waits for compute too.
        after = [self._device.mark(), saved]
        fetched = self._device.fetch.submit(self._copy_in(copies), after)
        for one in storages:
            one.fetched = fetched

    def _arrived(self, storage: SentStorage) -> None:
        assert storage.fetched is not None
        if storage.fetched is not self._held:  # what came in the same job has been waited for
            self._device.hold(storage.fetched)
            self._held = storage.fetched
        storage.fetched = None
        self._ahead_bytes -= storage.n_bytes

    def _let_go(self) -> None:
        _, n_bytes, saved = self._leaving.popleft()
        self._device.hold(saved)
        self._leaving_bytes -= n_bytes

    # These jobs let go of device memory before their events say that they are done.

    def _copy_out(self, copies: list[tuple[Tensor, torch.UntypedStorage]]) -> Job:
        def copy() -> None:
            while copies:
                host, storage = copies.pop()
                self._device.copy_out(host, _bytes_of(storage))

        return copy

    def _copy_in(self, copies: list[tuple[Tensor, Tensor]]) -> Job:
        def copy() -> None:
            while copies:
                back, host = copies.pop()
                self._device.copy_in(_bytes_of(back.untyped_storage()), host)

        return copy


class Parcel:
    """What one graph has on the host."""

    def __init__(self, offload: Offload, alone: bool) -> None:
        self.offload, self.alone = offload, alone
        self._known = LiveStorages[tuple[AnyStorage, int]]()
        """What was saved, and by which layer last. Only from what the layer that runs has saved is
        anything made again, so that each layer's backward needs what was predicted for the layer
        alone."""
        self._layer = 0
        self._packed: list[SentStorage] = []

    def begin_layer(self) -> None:
        """Take note that the next layer's operations follow."""
        self._layer += 1

    def find(self, tensor: Tensor) -> Away | None:
        """Return what stands for a tensor that the layer has saved already."""
        known = self._known.get(tensor)
        if known is None or known[1] != self._layer:
            return None
        return Away(self, known[0], view_of(tensor), argument=True)

    def pack(
        self, tensor: Tensor, remake: Callable[[Tensor], RematerializedStorage | None] | None = None
    ) -> Away | Tensor:
        """Send a tensor that autograd saves, unless its storage has been sent already, or
        `remake` finds how it is made again."""
        storage, layer = self._known.get(tensor) or (None, None)
        if layer != self._layer:
            if not isinstance(
                storage, SentStorage
            ):  # what another layer makes again does not count
                storage = self._new(tensor, remake)
                if storage is None:
                    return tensor.data
            self._known.put(tensor, (storage, self._layer))
        assert storage is not None
        storage.users += 1
        if isinstance(storage, SentStorage):
            self._packed.append(storage)
        else:
            self._note_needed(storage)
        return Away(self, storage, view_of(tensor))

    def takes(self, tensor: Tensor) -> bool:
        """Return whether there is anything to send, and on this device: operations leave what they
        drew a mask from on the host."""
        here = tensor.device.type == self.offload.device_type
        return here and tensor.untyped_storage().nbytes() > 0

    def send(self, tensor: Tensor) -> SentStorage:
        """Send a tensor's storage, unless that was done."""
        known = self._known.get(tensor)
        storage = None if known is None else known[0]
        if not isinstance(storage, SentStorage):
            storage = self.offload.send(tensor, package_of(tensor))
        self._known.put(tensor, (storage, self._layer))
        return storage

    def note(self, needed: Iterable[SentStorage]) -> None:
        """Note that backward needs these next, before what was noted earlier."""
        self._packed.extend(needed)

    def _new(
        self, tensor: Tensor, remake: Callable[[Tensor], RematerializedStorage | None] | None
    ) -> AnyStorage | None:
        """Return what a tensor's storage becomes, or `None` where there is nothing to send."""
        if not tensor.untyped_storage().nbytes():
            return None
        rematerialized = None if remake is None else remake(tensor)
        if rematerialized is None:
            return self.offload.send(tensor, package_of(tensor))
        for argument in arguments_of(rematerialized):
            argument.users += 1
        return rematerialized

    def unpack(self, away: Away, unpack: Unpack) -> Tensor:
        """Return a saved tensor; `unpack` finds what it is made from, if it is made again."""
        storage = away.storage
        if isinstance(storage, SentStorage):
            back = self.offload.use(storage)
        else:
            back = storage.operation.result(storage.index, unpack)
        view = seen_as(back, away.view)
        if not away.used:
            away.used = True
            storage.users -= 1
        self._release(storage)
        return view

    def order(self) -> list[SentStorage]:
        """Return the storages in the order in which backward first needs them.

        It goes through forward's operations from the last one.
        """
        return list(dict.fromkeys(reversed(self._packed)))

    def close(self) -> None:
        """Free everything; backward is over."""
        self.offload.forget(self._packed)
        self._packed.clear()

    def _note_needed(self, storage: RematerializedStorage) -> None:
        """Note what is needed where backward makes a storage again."""
        self.note(needed_for(storage))

    def _release(self, storage: AnyStorage) -> None:
        """Free on the device what nobody uses any more, and bring the next."""
        if isinstance(storage, SentStorage):
            self.offload.used(storage)
        elif not storage.users and storage.drop():
            for argument in arguments_of(storage):
                argument.users -= 1
                self._release(argument)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return view_at(storage, View(torch.uint8, 0, torch.Size((storage.nbytes(),)), (1,)))


def needed_for(storage: AnyStorage) -> list[SentStorage]:
    """Return the sent storages that a storage is made from, or it alone, in their order."""
    needed: dict[AnyStorage, None] = {}
    _add_needed(storage, needed)
    return [one for one in reversed(needed) if isinstance(one, SentStorage)]


def _add_needed(
    storage: AnyStorage,
    needed: dict[AnyStorage, None],
) -> None:
    """Add a storage and all that it is made from, each once, last ones first."""
    if storage not in needed:
        needed[storage] = None
        if isinstance(storage, RematerializedStorage):
            for argument in reversed(arguments_of(storage)):
                _add_needed(argument, needed)


def arguments_of(
    rematerialized: RematerializedStorage,
) -> list[AnyStorage]:
    """Return the storages among the arguments that are not in a place of their own."""
    return [at.storage for at in rematerialized.operation.arguments() if isinstance(at, Away)]
