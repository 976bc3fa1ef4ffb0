"""Where the tensors of the optimizer's state lie: in the file, and in memory that a block fills.

Each has a place of whole pages in the file; in memory those of a block lie one behind the other, in
the file's order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from atomtrain.planning.plan.disk import paged


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
