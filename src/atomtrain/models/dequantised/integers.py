"""Linear layers in whole numbers of a few bits with zero points: GPTQ and AWQ.

Both keep `[I, O]`: `scales` `[groups, O]`, `qzeros` `[groups, O*bits/32]` int32, codes in int32,
lowest bits first. GPTQ (Frantar et al. 2022) packs inputs, `[I*bits/32, O]`, and stores zero points
less one; AWQ (Lin et al. 2023) packs outputs, `[I, O*bits/32]`, in an order of its own. A weight is
`scale * (code - zero)`, computed in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

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

_CODES = "qweight"
_WORD = 32
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word AWQ puts each of eight outputs."""


class _Layout(NamedTuple):
    stem: str
    """Name of the layer, with the dot."""
    inputs: int
    outputs: int
    bits: int
    group: int
    """Inputs of a group."""
    places: tuple[int, ...]
    """Where in a word of outputs each lies."""
    later: int
    """What is added to stored zero points."""
    ordered: bool
    """Whether `g_idx` says which group each input is of."""


def find_gptq(entries: Entries, settings: Mapping[str, Any]) -> list[Packed]:
    """Return the weights that GPTQ stored.

    Raises:
        DataError: one lacks a part, or a part is of another shape or type.
    """
    bits, per_word = settings["bits"], _WORD // settings["bits"]
    later = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1
    found = []
    for stem, (words, outputs) in _matrices(entries):
        inputs = words * per_word
        group = _group(settings, inputs)
        ordered = f"{stem}g_idx" in entries
        places = tuple(range(per_word))
        layout = _Layout(stem, inputs, outputs, bits, group, places, later, ordered)
        found.append(_packed(entries, layout, _gptq_slices))
    return found


def find_awq(entries: Entries, settings: Mapping[str, Any]) -> list[Packed]:
    """Return the weights that AWQ stored.

    Raises:
        DataError: as of GPTQ.
    """
    bits = settings["bits"]
    found = []
    for stem, (inputs, words) in _matrices(entries):
        outputs, group = words * _WORD // bits, _group(settings, inputs)
        layout = _Layout(stem, inputs, outputs, bits, group, _AWQ_PLACES, 0, False)
        found.append(_packed(entries, layout, _awq_slices))
    return found


def _matrices(entries: Entries) -> Iterator[tuple[str, tuple[int, int]]]:
    for name, entry in entries.items():
        if not name.endswith(f".{_CODES}"):
            continue
        check_part(entries, name, dtypes=[torch.int32])
        if len(entry.shape) != 2 or not elements(entry.shape):
            raise unfit(entries, name, "which is not a matrix")
        yield name.removesuffix(_CODES), (entry.shape[0], entry.shape[1])


def _group(settings: Mapping[str, Any], inputs: int) -> int:
    size = int(settings.get("group_size", -1))
    return inputs if size == -1 else size


def _packed(entries: Entries, layout: _Layout, slices: Any) -> Packed:
    stem, codes = layout.stem, f"{layout.stem}{_CODES}"
    groups = -(-layout.inputs // layout.group)
    words, rest = divmod(layout.outputs * layout.bits, _WORD)
    if rest:
        raise unfit(entries, codes, f"whose outputs do not fill words of {_WORD} bits")
    parts = [codes]
    for name, shape, dtypes in (
        (f"{stem}qzeros", (groups, words), (torch.int32,)),
        (f"{stem}scales", (groups, layout.outputs), _FLOATS),
    ):
        check_part(entries, part_of(entries, codes, [name]), shape, dtypes, codes=codes)
        parts.append(name)
    if layout.ordered:
        check_part(entries, f"{stem}g_idx", (layout.inputs,), [torch.int32], codes=codes)
        parts.append(f"{stem}g_idx")
    shape = (layout.outputs, layout.inputs)
    told = parts[-1] if layout.ordered else None
    return Packed(f"{stem}weight", tuple(parts), shape, partial(slices, layout), told)


def _gptq_slices(layout: _Layout, files: WeightFiles) -> Iterator[Tensor]:
    words = files.read(f"{layout.stem}{_CODES}")  # [I*bits/32, O]
    for first, last in _output_ranges(layout):
        part = words[:, first:last]
        codes = _unpacked(part, range(_WORD // layout.bits), layout.bits)  # [words, O, per word]
        yield _wide(layout, codes.transpose(0, 1).reshape(last - first, -1), first, files)


def _awq_slices(layout: _Layout, files: WeightFiles) -> Iterator[Tensor]:
    words, per_word = files.read(f"{layout.stem}{_CODES}"), _WORD // layout.bits
    for first, last in _output_ranges(layout):
        part = words[:, first // per_word : last // per_word]  # [I, O*bits/32]
        codes = _unpacked(part, layout.places, layout.bits).flatten(1)  # [I, O]
        yield _wide(layout, codes.T, first, files)


def _output_ranges(layout: _Layout) -> Iterator[tuple[int, int]]:
    per_word = _WORD // layout.bits
    step = max(1, SLICE_ELEMENTS // layout.inputs // per_word) * per_word
    for first in range(0, layout.outputs, step):
        yield first, min(first + step, layout.outputs)


def _wide(layout: _Layout, codes: Tensor, first: int, files: WeightFiles) -> Tensor:
    """Return rows of the weight, float32, from their codes `[some outputs, I]`."""
    stem, last = layout.stem, first + len(codes)
    zeros = _unpacked(files.read(f"{stem}qzeros"), layout.places, layout.bits).flatten(1)
    zeros = (zeros + layout.later) & ((1 << layout.bits) - 1)
    scales = files.read(f"{stem}scales").float()
    if layout.ordered:
        groups = files.read(f"{stem}g_idx")
        if int(groups.min()) < 0 or int(groups.max()) >= len(scales):
            raise unfit(files.entries, f"{stem}g_idx", f"with groups beyond {len(scales)}")
    else:
        groups = torch.arange(layout.inputs) // layout.group
    offsets = codes - zeros[:, first:last].T[:, groups]
    return offsets * scales[:, first:last].T[:, groups]


def _unpacked(words: Tensor, places: Any, bits: int) -> Tensor:
    """Return the codes of each word, int32, in a last dimension of their own."""
    shifts = torch.tensor([place * bits for place in places], dtype=torch.int32)
    return (words[..., None] >> shifts) & ((1 << bits) - 1)
