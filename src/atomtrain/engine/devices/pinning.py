"""Pinned host memory: as much as the system allows, chunk by chunk, and a way for the rest.

Containers and WSL2 may allow less than a model takes, down to half a GiB. What cannot be pinned
passes through a few pinned buffers of the stream that copies it, and through ordinary memory where
not even those can be had. Regions are known by address, since a copy must not cross from one into
the next: CUDA refuses that.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atomtrain.engine.devices.host_memory import aligned_empty
from atomtrain.units import format_bytes

CHUNK_BYTES = 64 << 20
RING_BYTES = 4 << 20
"""Of each of the buffers of a `StagingRing`: some hundred microseconds of the link."""
_RING_BUFFERS = 2
_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for all GPUs, since several may load from one copy."""
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

    def pin(self, memory: Tensor) -> int:
        """Pin memory in place until it is freed; return how many bytes of it are.

        Args:
            memory: uint8, 1-D, in pages of its own. A page cannot be pinned twice.
        """
        start, runtime = memory.data_ptr(), torch.cuda.cudart()
        regions, code = _register(runtime, start, start + memory.numel())
        if code and regions:  # or nothing would be left for rings, and for later small buffers
            _unregister(runtime, [regions.pop()])
        pinned = sum(region.stop - region.start for region in regions)
        if pinned < memory.numel():
            regions.append(_Region(start + pinned, start + memory.numel(), pinned=False))
        with self._lock:
            for region in regions:
                bisect.insort(self._starts, region.start)
                self._regions[region.start] = region
        # Unpinned before the memory itself is freed: the storage's finalizer runs first.
        weakref.finalize(memory.untyped_storage(), self._forget, runtime, regions)
        if code and not self._told:
            self._told = True
            _logger.warning(
                "only %s of %s of host memory could be pinned (CUDA error %d), so copies of the "
                "rest take longer than predicted; raise the limit of locked memory (ulimit -l "
                "unlimited, in a container --ulimit memlock=-1), or give WSL2 more memory",
                format_bytes(pinned),
                format_bytes(memory.numel()),
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

    def _forget(self, runtime: Any, regions: Sequence[_Region]) -> None:
        _unregister(runtime, [region for region in regions if region.pinned])
        with self._lock:
            for region in regions:
                del self._regions[region.start]
                del self._starts[bisect.bisect_left(self._starts, region.start)]


PINS = Pins()


def _register(runtime: Any, start: int, stop: int) -> tuple[list[_Region], int]:
    """Pin chunk by chunk until one fails; return those that are pinned, and CUDA's error or 0."""
    regions: list[_Region] = []
    for at in range(start, stop, CHUNK_BYTES):
        n_bytes = min(CHUNK_BYTES, stop - at)
        code = int(runtime.cudaHostRegister(at, n_bytes, _PORTABLE))
        if code:
            _clear_error()
            return regions, code
        regions.append(_Region(at, at + n_bytes))
    return regions, 0


def _unregister(runtime: Any, regions: Iterable[_Region]) -> None:
    for region in regions:
        runtime.cudaHostUnregister(region.start)


def _clear_error() -> None:
    """Have CUDA forget the last error, which the next kernel's launch would take for its own.

    PyTorch's binding has no cudaGetLastError, but asks it after each launch, and raises.
    """
    with contextlib.suppress(RuntimeError):
        torch.cuda._sleep(0)


def pinnable_bytes(most_bytes: int) -> int:
    """Return how much more memory can be pinned on this machine; all of it is given back.

    Tries pieces that grow from one chunk, each on top of the ones before. Starts CUDA.

    Args:
        most_bytes: As much is tried at most.
    """
    held: list[Tensor] = []
    regions: list[_Region] = []
    n_bytes, found, code = CHUNK_BYTES, 0, 0
    runtime = torch.cuda.cudart()
    try:
        while not code and found < most_bytes:
            memory = aligned_empty(min(n_bytes, most_bytes - found))
            held.append(memory)
            more, code = _register(runtime, memory.data_ptr(), memory.data_ptr() + memory.numel())
            regions += more
            found += sum(region.stop - region.start for region in more)
            n_bytes *= 2
    finally:
        _unregister(runtime, regions)
    return found


class StagingRing:
    """Pinned buffers through which one stream copies host memory that is not pinned.

    Used by the stream's thread only, with the CUDA stream current. While a buffer is on its way
    over the link, the processor fills or empties the next.
    """

    def __init__(self) -> None:
        self._buffers: list[tuple[Tensor, torch.cuda.Event]] | None = None

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
        _finish_here()
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
        leaving: deque[tuple[Tensor, Tensor, torch.cuda.Event]] = deque()
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

    def _made(self) -> list[tuple[Tensor, torch.cuda.Event]]:
        if self._buffers is None:
            memory = aligned_empty(_RING_BUFFERS * RING_BYTES)
            pinned = PINS.pin(memory) == memory.numel()
            self._buffers = [
                (buffer, torch.cuda.Event(blocking=True))
                for buffer in (memory.split(RING_BYTES) if pinned else ())
            ]
        return self._buffers


def _land(target: Tensor, buffer: Tensor, event: torch.cuda.Event) -> None:
    event.synchronize()
    target.copy_(buffer)


def _finish_here() -> None:
    """Wait for the current stream, without keeping a core busy."""
    event = torch.cuda.Event(blocking=True)
    event.record()
    event.synchronize()
