"""The weights of a folder as if they had been published wide."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atomtrain.errors import DataError
from atomtrain.models.dequantised import bitsandbytes, floats, integers
from atomtrain.models.dequantised.packed import Entries, Packed
from atomtrain.models.hugging_face import read_quantisation
from atomtrain.models.weights.files import Entry, WeightFiles, check_target, is_finite

_FINDING: dict[str, Callable[[Entries, Mapping[str, Any]], list[Packed]]] = {
    "fp8": floats.find_fp8,
    "mxfp4": floats.find_mxfp4,
    "bitsandbytes": bitsandbytes.find,
    "gptq": integers.find_gptq,
    "awq": integers.find_awq,
}


def open_weights(folder: Path) -> WeightFiles:
    """Return the tensors of a model's folder; quantised ones are made wide when they are read.

    Raises:
        ConfigError: they are quantised in a way that is not known.
        DataError: a file is missing or damaged, or a quantised weight lacks a part.
    """
    settings = read_quantisation(folder)
    files = WeightFiles(folder)
    return files if settings is None else DequantisedFiles(files, settings)


class DequantisedFiles(WeightFiles):
    """Files of which some tensors are the parts of weights in few bits.

    The names, shapes and values are those of the wide weights: of float32 (rounded once, where it
    is read into a narrower type), or what the published formula rounds to.
    """

    def __init__(self, stored: WeightFiles, settings: Mapping[str, Any]) -> None:
        """Find what is quantised.

        Raises:
            DataError: a quantised weight lacks a part.
        """
        self.folder = stored.folder
        self._stored = stored
        packed = _FINDING[settings["quant_method"]](stored.entries, settings)
        parts = {part for each in packed for part in each.parts}
        self._packed = {each.name: each for each in packed}
        self.entries = {name: entry for name, entry in stored.entries.items() if name not in parts}
        for each in packed:
            first = stored.entries[each.parts[0]]
            if each.name in self.entries:
                raise DataError(
                    f"{first.file} holds {each.parts[0]!r}, and {each.name!r} is there wide, too; "
                    "remove the one that is not the model's"
                )
            self.entries[each.name] = Entry(first.file, torch.float32, each.shape, first.start)

    def read_into(self, name: str, target: Tensor) -> None:
        """Fill `target`; beside it, memory holds what its format makes wide at once.

        That is 5 MiB or less with FP8 and bitsandbytes, one expert with MXFP4, and one matrix's
        codes with GPTQ and AWQ.

        Raises:
            DataError: as of any file.
        """
        packed = self._packed.get(name)
        if packed is None:
            super().read_into(name, target)
            return
        entry = self.entries[name]
        check_target(entry, name, target)
        flat, done = target.view(-1), 0
        for values in self._wide(packed):
            flat[done : done + values.numel()].copy_(values.reshape(-1))
            done += values.numel()

    def reader(self, dtype: torch.dtype) -> Callable[[str], Tensor]:
        """Return what reads a tensor by its name, a quantised one in `dtype`."""
        return partial(self._read_as, dtype=dtype)

    def order(self, name: str) -> Tensor | None:
        """Return the columns of a tensor sorted by the group that they were quantised in, `[I]`;
        `None` where nothing tells it.

        Raises:
            DataError: as of any file.
        """
        packed = self._packed.get(name)
        if packed is None or packed.groups is None:
            return None
        return torch.argsort(self._stored.read(packed.groups), stable=True)

    def _read_as(self, name: str, *, dtype: torch.dtype) -> Tensor:
        if name not in self._packed:
            return self.read(name)
        tensor = torch.empty(self.entries[name].shape, dtype=dtype)
        self.read_into(name, tensor)
        return tensor

    def _wide(self, packed: Packed) -> Iterator[Tensor]:
        for values in packed.slices(self._stored):
            if not is_finite(values):
                raise DataError(
                    f"{self.entries[packed.name].file} holds {packed.parts[0]!r}, which becomes "
                    "values that are not numbers (NaN or infinite); its weights are damaged: give "
                    "a whole copy"
                )
            yield values
