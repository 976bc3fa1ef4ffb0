"""Linear layers as bitsandbytes stores them: NF4 and FP4 in blocks, or rows of int8.

In 4 bits `X.weight` has two indices a byte, the earlier one in the high half, into
`X.weight.quant_map`; `X.weight.absmax` has a factor a block, itself in 8 bits if there are
`nested_*`. The JSON in `X.weight.quant_state.bitsandbytes__nf4` says the rest (Dettmers et al.
2023, section 3). In 8 bits `X.weight` is int8 `[O, I]`, `X.SCB` the largest absolute value of each
row, which 127 stands for (Dettmers et al. 2022, section 2).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atomtrain.errors import DataError
from atomtrain.models.dequantised.packed import (
    SLICE_ELEMENTS,
    Entries,
    Packed,
    check_part,
    elements,
    part_of,
    unfit,
)
from atomtrain.models.weights.files import WeightFiles

_STATE = ".quant_state.bitsandbytes__"
_KINDS = ("nf4", "fp4")
_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SCALE_OF_8 = "SCB"
_STEP_OF_8 = 7.874015748031496e-3
"""1/127, by which bitsandbytes multiplies in float32."""
_MOST_STATE_BYTES = 1 << 16


class _State(NamedTuple):
    shape: tuple[int, ...]
    block: int
    dtype: torch.dtype
    """To which bitsandbytes rounds it."""
    nested_block: int
    """Factors of a block of their own; 0 if they are wide."""
    offset: float
    """That is added to nested factors."""


def find(entries: Entries, _: Mapping[str, Any]) -> list[Packed]:
    """Return the weights that are stored in 8 or 4 bits; of the latter each one's JSON is read.

    Raises:
        DataError: one lacks a part, or a part is of another shape or type.
    """
    states = {
        name.partition(_STATE)[0]: name for name in entries if name.partition(_STATE)[2] in _KINDS
    }
    found = [_find_4(entries, name, state) for name, state in states.items()]
    for name, entry in entries.items():
        if entry.dtype == torch.int8 and len(entry.shape) == 2 and name.endswith("weight"):
            found.append(_find_8(entries, name))
        elif entry.dtype == torch.uint8 and name.endswith(".weight") and name not in states:
            part_of(entries, name, [f"{name}{_STATE}{_KINDS[0]}"])
    return found


def _find_8(entries: Entries, name: str) -> Packed:
    scales = part_of(entries, name, [name.removesuffix("weight") + _SCALE_OF_8])
    shape = entries[name].shape
    check_part(entries, scales, shape[:1], list(_TYPES.values()), codes=name)
    return Packed(name, (name, scales), shape, partial(_slices_8, name, scales))


def _slices_8(name: str, scales: str, files: WeightFiles) -> Iterator[Tensor]:
    rows, columns = files.entries[name].shape
    factors = files.read(scales).float()
    step = max(1, SLICE_ELEMENTS // max(1, columns))
    for first in range(0, rows, step):
        each = factors[first : first + step, None]
        codes = files.read_elements(name, first * columns, len(each) * columns)
        yield (codes.view(len(each), columns) * each).mul_(_STEP_OF_8)


def _find_4(entries: Entries, name: str, state_name: str) -> Packed:
    part_of(entries, state_name, [name])
    state = _read_state(entries, state_name)
    count = elements(state.shape)
    check_part(entries, name, dtypes=[torch.uint8])
    if elements(entries[name].shape) != -(-count // 2):
        raise unfit(entries, name, f"which is not half of {list(state.shape)}")
    blocks = -(-count // state.block)
    wide = (torch.float32,)
    shapes: dict[str, tuple[int, tuple[torch.dtype, ...]]] = {
        f"{name}.quant_map": (16, wide),
        f"{name}.absmax": (blocks, (torch.uint8,) if state.nested_block else wide),
    }
    if state.nested_block:
        shapes[f"{name}.nested_absmax"] = (-(-blocks // state.nested_block), wide)
        shapes[f"{name}.nested_quant_map"] = (256, wide)
    for part, (size, dtypes) in shapes.items():
        check_part(entries, part_of(entries, name, [part]), (size,), dtypes, codes=name)
    slices = partial(_slices_4, name, state)
    return Packed(name, (name, state_name, *shapes), state.shape, slices)


def _read_state(entries: Entries, name: str) -> _State:
    """Read the JSON.

    Raises:
        DataError: it is none, or says what cannot be.
    """
    entry = entries[name]
    try:
        if entry.dtype != torch.uint8 or entry.size_bytes > _MOST_STATE_BYTES:
            raise ValueError("it is not a short text")
        with Path(entry.file).open("rb") as stream:
            stream.seek(entry.start)
            said = json.loads(stream.read(entry.size_bytes))
        nested = "nested_blocksize" in said
        state = _State(
            tuple(int(size) for size in said["shape"]),
            int(said["blocksize"]),
            _TYPES[str(said["dtype"]).removeprefix("torch.")],
            int(said["nested_blocksize"]) if nested else 0,
            float(said["nested_offset"]) if nested else 0.0,
        )
        if min(state.shape) < 1 or state.block < 2 or state.block % 2 or state.nested_block < 0:
            raise ValueError("a size in it cannot be")
    except OSError as error:
        raise DataError(f"{entry.file} cannot be read ({error.strerror or error})") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{entry.file} holds {name!r}, which does not say how a weight was quantised "
            f"({type(error).__name__}: {error}); give a complete copy of the model"
        ) from error
    return state


def _slices_4(name: str, state: _State, files: WeightFiles) -> Iterator[Tensor]:
    count = elements(state.shape)
    levels = files.read(f"{name}.quant_map")
    factors = _factors(name, state, files)
    step = max(1, SLICE_ELEMENTS // state.block)  # in blocks, which have whole bytes
    for block in range(0, len(factors), step):
        each = factors[block : block + step]
        first = block * state.block
        size = min(len(each) * state.block, count - first)
        codes = files.read_elements(name, first // 2, -(-size // 2))
        values = levels[torch.stack((codes >> 4, codes & 15), -1).view(-1)[:size].int()]
        values.mul_(each.repeat_interleave(state.block)[:size])
        yield values.to(state.dtype)


def _factors(name: str, state: _State, files: WeightFiles) -> Tensor:
    stored = files.read(f"{name}.absmax")
    if not state.nested_block:
        return stored
    levels = files.read(f"{name}.nested_quant_map")
    outer = files.read(f"{name}.nested_absmax").repeat_interleave(state.nested_block)
    return levels[stored.int()].mul_(outer[: len(stored)]).add_(state.offset)
