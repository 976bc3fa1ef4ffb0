"""A weight in few bits: the stored tensors that it takes, and how it is made wide in slices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from atomtrain.errors import DataError
from atomtrain.models.weights.files import Entry, WeightFiles

Entries = Mapping[str, Entry]
SLICE_ELEMENTS = 1 << 18
"""Elements that are made wide at once, where a format does not ask for more."""


class Packed(NamedTuple):
    """One of a model's weights, as published."""

    name: str
    """The name that it has wide."""
    parts: tuple[str, ...]
    """Names of the stored tensors that it takes; the first one has the codes."""
    shape: tuple[int, ...]
    """Of the wide weight."""
    slices: Callable[[WeightFiles], Iterator[Tensor]]
    """Yields the wide weight's values in their order, in float types, from what is stored."""
    groups: str | None = None
    """Name of the stored tensor that tells the group of each column, if one does."""


def part_of(entries: Entries, codes: str, names: Sequence[str]) -> str:
    """Return the first of `names` that is stored.

    Raises:
        DataError: none is.
    """
    for name in names:
        if name in entries:
            return name
    raise DataError(
        f"{entries[codes].file} holds {codes!r} in few bits, and {names[0]!r} is missing; give a "
        "complete copy of the model"
    )


def check_part(
    entries: Entries,
    name: str,
    shape: Sequence[int] | None = None,
    dtypes: Sequence[torch.dtype] = (),
    codes: str = "",
) -> None:
    """Refuse a stored tensor of another shape or type.

    Args:
        entries: All that are stored.
        name: Of the tensor.
        shape: That it must have; `None` where any will do.
        dtypes: That it may have; all, if there are none.
        codes: Name of the codes that it belongs to.

    Raises:
        DataError: it is of another.
    """
    entry = entries[name]
    belongs = f" of {codes!r}, whose shape is {list(entries[codes].shape)}," if codes else ""
    if shape is not None and entry.shape != tuple(shape):
        raise DataError(
            f"{entry.file} holds {name!r}{belongs} of shape {list(entry.shape)}, not "
            f"{list(shape)}; config.json and weights must be of one complete copy"
        )
    if dtypes and entry.dtype not in dtypes:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise DataError(
            f"{entry.file} holds {name!r}{belongs} as {str(entry.dtype).removeprefix('torch.')}; "
            f"it may be {known}: give another copy"
        )


def unfit(entries: Entries, name: str, reason: str) -> DataError:
    entry = entries[name]
    return DataError(
        f"{entry.file} holds {name!r} of shape {list(entry.shape)}, {reason}; give a complete copy "
        "of the model"
    )


def elements(shape: Sequence[int]) -> int:
    return math.prod(shape)
