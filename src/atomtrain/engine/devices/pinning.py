"""Pinned host memory: as much as the system allows, chunk by chunk, and a way for the rest.

Containers and WSL2 may allow less than a model takes, down to half a GiB. What cannot be pinned
passes through a few pinned buffers of the stream that copies it, and through ordinary memory where
not even those can be had. So does all memory of GPUs that cannot pin what is there already. Regions
are known by address, since a copy must not cross from one into the next: CUDA refuses that.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from atomtrain.engine.devices.host_memory import aligned_empty
from atomtrain.engine.devices.vendor import Registrar, Vendor
from atomtrain.units import format_bytes

CHUNK_BYTES = 64 << 20
RING_BYTES = 4 << 20
"""Of each of the buffers of a `StagingRing`: some hundred microseconds of the link."""
_RING_BUFFERS = 2
_logger = logging.getLogger(__name__)


class Part(NamedTuple):
    """A run of bytes of a host tensor that a copy takes at once."""

    start_bytes: int
    stop_bytes: int
    staged: bool
    """It was to be pinned and is not."""


class _Region(NamedTuple):
    """Addresses."""

    start: int
    stop: int
    pinned: bool = True


class Pins:
    """The memory of this process that was to be pinned, by address."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts: list[int] = []
        """Sorted."""
        self._regions: dict[int, _Region] = {}
        """By start."""
        self._told = False

    def pin(self, memory: Tensor, vendor: Vendor) -> int:
        """Pin memory in place until it is freed; return how many bytes of it are.

        Args:
            memory: uint8, 1-D, in pages of its own. A page cannot be pinned twice.
            vendor: Whose GPUs will copy it.
        """
        start, stop = memory.data_ptr(), memory.data_ptr() + memory.numel()
        registrar = vendor.registrar() if vendor.registers else None
        regions, code = ([], 0) if registrar is None else _register(registrar, start, stop)
        if code and regions:  # or nothing would be left for rings, and for later small buffers
            _unregister(registrar, [regions.pop()])
        pinned = sum(region.stop - region.start for region in regions)
        if pinned < memory.numel():
            regions.append(_Region(start + pinned, stop, pinned=False))
        with self._lock:
            for region in regions:
                bisect.insort(self._starts, region.start)
                self._regions[region.start] = region
        # Unpinned before the memory itself is freed: the storage's finalizer runs first.
        weakref.finalize(memory.untyped_storage(), self._forget, registrar, regions)
        if code and not self._told:
            self._told = True
            _logger.warning(
                "only %s of %s of host memory could be pinned (%s error %d), so copies of the "
                "rest take longer than predicted; raise the limit of locked memory (ulimit -l "
                "unlimited, in a container --ulimit memlock=-1), or give WSL2 more memory",
                format_bytes(pinned),
                format_bytes(memory.numel()),
                vendor.title,
                code,
            )
        return pinned

    def parts(self, tensor: Tensor) -> list[Part]:
        """Return the runs of a dense host tensor that lie in one region each; memory that was not
        to be pinned is one run."""
        begin = tensor.data_ptr()
        end = begin + tensor.nbytes
        found: list[Part] = []
        with self._lock:
            index = bisect.bisect_right(self._starts, begin) - 1
            at = begin
            while at < end and 0 <= index < len(self._starts):
                region = self._regions[self._starts[index]]
                if not region.start <= at < region.stop:
                    break
                stop = min(region.stop, end)
                found.append(Part(at - begin, stop - begin, not region.pinned))
                at, index = stop, index + 1
        return found or [Part(0, end - begin, staged=False)]

    def _forget(self, registrar: Registrar | None, regions: Sequence[_Region]) -> None:
        _unregister(registrar, [region for region in regions if region.pinned])
        with self._lock:
            for region in regions:
                del self._regions[region.start]
                del self._starts[bisect.bisect_left(self._starts, region.start)]


PINS = Pins()


def _register(registrar: Registrar, start: int, stop: int) -> tuple[list[_Region], int]:
    """Pin chunk by chunk until one fails; return those that are pinned, and its error or 0."""
    regions: list[_Region] = []
    for at in range(start, stop, CHUNK_BYTES):
        n_bytes = min(CHUNK_BYTES, stop - at)
        if code := registrar.register(at, n_bytes):
            return regions, code
        regions.append(_Region(at, at + n_bytes))
    return regions, 0


def _unregister(registrar: Registrar | None, regions: Iterable[_Region]) -> None:
    for region in regions:
        assert registrar is not None, "it has pinned them"
        registrar.unregister(region.start)


def pinnable_bytes(vendor: Vendor, most_bytes: int) -> int:
    """Return how much more memory can be pinned on this machine; all of it is given back.

    Tries pieces that grow from one chunk, each on top of the ones before. Starts the driver.

    Args:
        vendor: Whose GPUs it is pinned for, in place.
        most_bytes: As much is tried at most.
    """
    held: list[Tensor] = []
    regions: list[_Region] = []
    n_bytes, found, code = CHUNK_BYTES, 0, 0
    registrar = vendor.registrar()
    try:
        while not code and found < most_bytes:
            memory = aligned_empty(min(n_bytes, most_bytes - found))
            held.append(memory)
            start = memory.data_ptr()
            more, code = _register(registrar, start, start + memory.numel())
            regions += more
            found += sum(region.stop - region.start for region in more)
            n_bytes *= 2
    finally:
        _unregister(registrar, regions)
    return found


class StagingRing:
    """Pinned buffers through which one stream copies host memory that is not pinned.

    Used by the stream's thread only, with the GPU's stream current. While a buffer is on its way
    over the link, the processor fills or empties the next.
    """

    def __init__(self, vendor: Vendor) -> None:
        self._vendor = vendor
        self._buffers: list[tuple[Tensor, Any]] | None = None
        """Each with an event: it is free again after that."""

    def copy_in(self, target: Tensor, source: Tensor) -> None:
        """Copy from the host; returns when the source has been read.

        Args:
            target: `[n]` uint8 on the device.
            source: `[n]` uint8, ordinary memory.
        """
        if not (buffers := self._made()):
            target.copy_(source, non_blocking=True)  # waits for what came before, and for itself
            return
        # What is to be read may be on its way from a device, in a copy that this stream follows.
        event = self._vendor.event()
        event.record()
        event.synchronize()
        pieces = zip(target.split(RING_BYTES), source.split(RING_BYTES), strict=True)
        for (to, of), (buffer, event) in zip(pieces, itertools.cycle(buffers), strict=False):
            event.synchronize()  # the buffer is free again
            buffer[: of.numel()].copy_(of)
            to.copy_(buffer[: of.numel()], non_blocking=True)
            event.record()

    def copy_out(self, target: Tensor, source: Tensor) -> None:
        """Copy to the host; returns when the target has been written.

        Args:
            target: `[n]` uint8, ordinary memory.
            source: `[n]` uint8 on the device.
        """
        if not (buffers := self._made()):
            target.copy_(source, non_blocking=True)  # waits, as for any ordinary memory
            return
        leaving: deque[tuple[Tensor, Tensor, Any]] = deque()
        pieces = zip(target.split(RING_BYTES), source.split(RING_BYTES), strict=True)
        for (to, of), (buffer, event) in zip(pieces, itertools.cycle(buffers), strict=False):
            if len(leaving) == len(buffers):
                _land(*leaving.popleft())
            event.synchronize()  # a copy to the device may still read the buffer
            buffer[: of.numel()].copy_(of, non_blocking=True)
            event.record()
            leaving.append((to, buffer[: of.numel()], event))
        while leaving:
            _land(*leaving.popleft())

    def _made(self) -> list[tuple[Tensor, Any]]:
        if self._buffers is None:
            memory = self._pinned()
            buffers = () if memory is None else memory.split(RING_BYTES)
            self._buffers = [(buffer, self._vendor.event()) for buffer in buffers]
        return self._buffers

    def _pinned(self) -> Tensor | None:
        n_bytes = _RING_BUFFERS * RING_BYTES
        if not self._vendor.registers:
            return self._vendor.pinned_empty(n_bytes)
        memory = aligned_empty(n_bytes)
        return memory if PINS.pin(memory, self._vendor) == memory.numel() else None


def _land(target: Tensor, buffer: Tensor, event: Any) -> None:
    event.synchronize()
    target.copy_(buffer)
