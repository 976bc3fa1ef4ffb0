"""What lies on disk below host memory: the space that a plan takes, and where each tensor is.

Each tensor of the optimizer's state has a place of whole pages in the file. Staged in memory, those
of a block lie one behind the other, in the file's order.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from atomtrain.analysis.layers.chain import Chain
from atomtrain.engine.devices.disk_file import DiskFile
from atomtrain.planning.plan.disk import DiskUse, OnDisk, States, disk_use, paged
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
