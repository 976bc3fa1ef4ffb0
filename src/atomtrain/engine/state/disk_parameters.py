"""Parameters on disk: the arena is a file, read for the device and for updates past the page cache.

The arena of the host store is a mapping of the file, so everything that reads or writes the model
between steps (checkpoints, fragments, the caller's own code) finds it where it always is; the
system brings it in and drops it as it needs. A step does not go that way: what it loads is read
directly into pinned pieces, and what it updates into a staging slot (`disk_state`).

Hand-overs of a piece, each with the event that releases it:

| buffer | producer | consumer | released by |
|---|---|---|---|
| piece | read stream | load stream | the copy's event, awaited by the piece's next read |
| parameters on disk | write stream | read stream | the blocks' `updated` events |

Here is too what else tells where things lie on disk: the space that a plan takes, and the place of
each tensor of the optimizer's state, of whole pages. Staged in memory, those of a block lie one
behind the other, in the file's order.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from atomtrain.analysis.layers.chain import Chain
from atomtrain.engine.devices.device import Device
from atomtrain.engine.devices.disk_file import DiskFile
from atomtrain.engine.devices.host_memory import aligned_empty
from atomtrain.engine.devices.streams import Event, Stream, finished
from atomtrain.errors import DiskError
from atomtrain.planning.plan.disk import (
    LOAD_PIECES,
    PAGE_BYTES,
    DiskUse,
    OnDisk,
    States,
    disk_use,
    paged,
)
from atomtrain.planning.plan.layout import Layout


class Placement(NamedTuple):
    """Where state lies that is on disk."""

    file: DiskFile
    use: DiskUse
    states: States


class DiskTraffic(NamedTuple):
    """What went to and from the disk since the engine was opened."""

    read_bytes: int
    written_bytes: int
    direct: bool
    """Whether it went past the page cache; some file systems refuse that."""


def placed(
    folder: Path, chain: Chain, layout: Layout, states: States, on_disk: OnDisk
) -> Placement:
    """Take the space that a choice needs.

    Raises:
        DiskError: the folder cannot be used, or has too little space.
    """
    use = disk_use(chain, layout, states, on_disk)
    return Placement(DiskFile(folder, use.file_bytes), use, states)


class Place(NamedTuple):
    """One tensor in the file."""

    offset: int
    dtype: torch.dtype
    shape: torch.Size

    @property
    def n_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class Run(NamedTuple):
    """A part of the file that is one part of a slot."""

    offset: int
    start: int
    stop: int


Key = tuple[int, str]
"""The parameter's `id` and the key in its state."""


def tensor_at(memory: Tensor, start: int, place: Place) -> Tensor:
    """Return the tensor of a place that lies in memory, `[bytes]` uint8, from `start` on."""
    return memory[start : start + place.n_bytes].view(place.dtype).view(place.shape)


def starts_of(places: dict[Key, Place]) -> dict[Key, int]:
    """Return where each tensor begins in a slot: in the order of the file."""
    starts, cursor = {}, 0
    for key, place in sorted(places.items(), key=lambda item: item[1].offset):
        starts[key] = cursor
        cursor += paged(place.n_bytes)
    return starts


def runs_of(places: dict[Key, Place]) -> list[Run]:
    """Return the fewest parts in which a block can be read or written."""
    runs: list[Run] = []
    cursor = 0
    for place in sorted(places.values(), key=lambda place: place.offset):
        n_bytes = paged(place.n_bytes)
        if runs and runs[-1].offset + runs[-1].stop - runs[-1].start == place.offset:
            runs[-1] = runs[-1]._replace(stop=cursor + n_bytes)
        else:
            runs.append(Run(place.offset, cursor, cursor + n_bytes))
        cursor += n_bytes
    return runs


class DiskArena:
    """All parameters in one part of a file. Threads may use different blocks at once."""

    def __init__(self, file: DiskFile, n_bytes: int) -> None:
        """Take the space.

        Raises:
            DiskError: the disk is full, or its file system keeps mappings and reads apart.
        """
        self._file, self._base = file, file.allocate(max(1, n_bytes))
        self._mapping = file.map(self._base, paged(max(1, n_bytes)))
        self.values = torch.frombuffer(self._mapping, dtype=torch.uint8)[:n_bytes]
        """The arena: `[n_bytes]` uint8."""
        self._check()

    def read(self, start: int, stop: int, memory: Tensor) -> Tensor:
        """Read a range into memory; return the part of it that holds the range.

        Args:
            start: The range's first byte in the arena.
            stop: The byte after its last one.
            memory: uint8 that begins at a page, with room for whole pages around the range.
        """
        first = start // PAGE_BYTES * PAGE_BYTES
        if start < stop:
            self._file.read(self._base + first, memory[: paged(stop) - first])
        return memory[start - first : stop - first]

    def write(self, start: int, stop: int, memory: Tensor) -> None:
        """Write a range that lies in memory where `read` put it.

        Pages that it shares with its neighbours are written through the mapping, so that blocks
        that are written at once cannot undo each other.
        """
        first = start // PAGE_BYTES * PAGE_BYTES
        low, high = paged(start), stop // PAGE_BYTES * PAGE_BYTES
        if low < high:
            self._file.write(self._base + low, memory[low - first : high - first])
        else:
            low = high = stop
        for begin, end in ((start, low), (high, stop)):
            self.values[begin:end].copy_(memory[begin - first : end - first])

    def keep(self, start: int, stop: int, memory: Tensor) -> None:
        """Put a range, as `write` takes it, into the mapping: for when the disk refuses it."""
        first = start // PAGE_BYTES * PAGE_BYTES
        self.values[start:stop].copy_(memory[start - first : stop - first])

    def forget(self) -> None:
        """Give back the memory of what was read or written through the mapping."""
        self._mapping.madvise(mmap.MADV_DONTNEED)

    def _check(self) -> None:
        """Make sure that what is written one way is read the other way."""
        page = aligned_empty(PAGE_BYTES)
        probe = torch.frombuffer(self._mapping, dtype=torch.uint8)[:PAGE_BYTES]
        for value in (1, 2):
            probe.fill_(value)
            self._file.read(self._base, page)
            seen = int(page[0])
            self._file.write(self._base, page.fill_(value + 2))
            if (seen, int(probe[0])) != (value, value + 2):
                raise DiskError(
                    f"the file system of {self._file.folder} keeps mapped files and direct reads "
                    "apart, so parameters cannot lie there; name a folder on a local disk"
                )
        probe.zero_()


class StagedLoads:
    """Copies parameters from the file to the device, piece by piece. One thread drives it."""

    def __init__(self, arena: DiskArena, device: Device, piece_bytes: int) -> None:
        self._arena, self._device = arena, device
        self._piece_bytes = max(PAGE_BYTES, piece_bytes)
        # A range need not begin at a page.
        size = self._piece_bytes + PAGE_BYTES
        self._pieces = deque(
            (aligned_empty(size, device.host_empty), finished()) for _ in range(LOAD_PIECES)
        )
        self.reading = Stream("read", device.inject)

    def beside(self, device: Device) -> StagedLoads:
        """Return what loads the same parameters to another device, through pieces of its own."""
        return StagedLoads(self._arena, device, self._piece_bytes)

    def submit(
        self,
        copies: Sequence[tuple[Tensor, Tensor]],
        ready: Sequence[Event],
        free: Event,
        label: str,
    ) -> Event:
        """Queue copies from the arena; return the event after which they are done.

        Args:
            copies: Targets on the device, each with its source, a view of the arena.
            ready: After these the parameters are on disk.
            free: After it the device's memory may be overwritten.
            label: Names them in traces.
        """
        loaded = None
        for target, source in copies:
            start = int(source.storage_offset())
            for at in range(0, source.numel(), self._piece_bytes):
                part = target[at : at + self._piece_bytes]
                loaded = self._submit(part, start + at, ready, free, label)
        if loaded is None:
            return self._device.load.submit(_nothing, [free, *ready], label)
        return loaded

    def close(self) -> None:
        """End the thread."""
        self.reading.close()

    def _submit(
        self, target: Tensor, start: int, ready: Sequence[Event], free: Event, label: str
    ) -> Event:
        memory, unused = self._pieces.popleft()
        found: list[Tensor] = []

        def read() -> None:
            found.append(self._arena.read(start, start + target.numel(), memory))

        def copy() -> None:
            self._device.copy_in(target, found[0])

        arrived = self.reading.submit(read, [unused, *ready], label)
        loaded = self._device.load.submit(copy, [free, arrived], label)
        self._pieces.append((memory, loaded))
        return loaded


def _nothing() -> None:
    pass
