"""Safetensors files read straight into memory that is there already, and never mapped or copied.

A file is 8 bytes (little-endian length of the header), a JSON header that gives type, shape and
byte range of each tensor, and the tensors themselves; see the format's description at
https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from atomtrain.errors import DataError, nearest, reason_of
from atomtrain.files import read_small

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
METADATA = "__metadata__"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_HEADER_MOST_BYTES = 32 << 20
"""Of a header or an index: a model of 10^12 parameters takes 15 MiB."""
_MOST_DIMENSIONS = 16
_SLICE_BYTES = 2 << 20
"""Bytes that are read and converted at once where types differ."""
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Entry(NamedTuple):
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Byte offset in the file."""

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class WeightFiles:
    """The tensors of the safetensors files of a folder, by name; nothing is kept open."""

    def __init__(self, folder: Path, files: Sequence[Path] | None = None) -> None:
        """Read the headers of `folder`'s files: of `model.safetensors`, or of those of its index.

        Args:
            folder: Of a model.
            files: Others of that folder, in place of the model's.

        Raises:
            DataError: there is none, one is missing, or is not a complete safetensors file.
        """
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        for file in files_of(folder) if files is None else files:
            for name, entry in read_header(file).items():
                if name in self.entries:
                    raise DataError(
                        f"{file} and {self.entries[name].file.name} both hold {name!r}; "
                        "remove the file that does not belong to the model"
                    )
                self.entries[name] = entry

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(entry.size_bytes for entry in self.entries.values())

    def read_into(self, name: str, target: Tensor) -> None:
        """Fill `target` with a tensor, converted to its type; needs no more than 2 MiB beside it.

        Args:
            name: One of the tensors.
            target: On the CPU, contiguous, of the tensor's shape.

        Raises:
            DataError: no such tensor, another shape, a value that is not finite, or the file
                cannot be read.
        """
        entry = self._entry(name)
        check_target(entry, name, target)
        flat = target.view(-1)
        with _opened(entry) as stream:
            step = _SLICE_BYTES // entry.dtype.itemsize
            scratch = torch.empty(min(step, flat.numel()), dtype=entry.dtype)
            for first in range(0, flat.numel(), step):
                part = flat[first : first + step]
                read = part if entry.dtype == part.dtype else scratch[: part.numel()]
                _read_exactly(stream, read)
                if not is_finite(read):
                    raise DataError(
                        f"{entry.file} holds {name!r} with values that are not numbers "
                        "(NaN or infinite); its weights are damaged: give a whole copy"
                    )
                if read is not part:
                    part.copy_(read)

    def read_elements(self, name: str, first: int, count: int) -> Tensor:
        """Return `count` elements of a tensor from its `first` on, 1-D, as they are stored.

        Raises:
            DataError: no such tensor, or the file cannot be read.
        """
        entry = self._entry(name)
        tensor = torch.empty(count, dtype=entry.dtype)
        with _opened(entry, first) as stream:
            _read_exactly(stream, tensor)
        return tensor

    def reader(self, dtype: torch.dtype) -> Callable[[str], Tensor]:
        """Return what reads a tensor by its name, as it is stored.

        Args:
            dtype: Of what is made of it; decides where tensors are stored in few bits.
        """
        return self.read

    def order(self, name: str) -> Tensor | None:
        """Return the columns of a tensor in the order in which they were quantised; `None` where
        that is how they lie."""
        return None

    def read(self, name: str) -> Tensor:
        """Return a tensor in memory of its own, as it is stored."""
        entry = self._entry(name)
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        self.read_into(name, tensor)
        return tensor

    def _entry(self, name: str) -> Entry:
        try:
            return self.entries[name]
        except KeyError:
            raise DataError(
                f"the weights in {self.folder} have no tensor {name!r}."
                f"{nearest(name, self.entries)}"
            ) from None


def check_target(entry: Entry, name: str, target: Tensor) -> None:
    """Refuse memory that a tensor cannot be read into.

    Raises:
        DataError: it is of another shape, or not contiguous.
    """
    if entry.shape != tuple(target.shape):
        raise DataError(
            f"{entry.file} holds {name!r} of shape {list(entry.shape)}, the model's has "
            f"{list(target.shape)}; config.json and weights must be of one model"
        )
    if not target.is_contiguous():
        raise DataError(f"{name!r} cannot be read into memory that is not contiguous")


@contextmanager
def _opened(entry: Entry, first: int = 0) -> Iterator[BinaryIO]:
    try:
        with entry.file.open("rb", buffering=0) as stream:
            stream.seek(entry.start + first * entry.dtype.itemsize)
            yield stream
    except OSError as error:
        raise DataError(f"{entry.file} cannot be read ({error.strerror or error})") from error


def is_finite(tensor: Tensor) -> bool:
    """Return whether all of a tensor's values are numbers; a sum tells of nearly all that it is.

    Those of 8 bits are codes: what they are made is looked at.
    """
    if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
        return True
    return bool(tensor.sum(dtype=torch.float32).isfinite()) or bool(tensor.isfinite().all())


def is_float(entry: Entry) -> bool:
    """Return whether a tensor holds plain floating-point numbers."""
    return entry.dtype in _FLOATS


def files_of(folder: Path) -> list[Path]:
    """Return the files that hold the weights of a model's folder, one or more.

    Raises:
        DataError: there is none, or one of several is missing.
    """
    index = folder / INDEX_FILE
    if index.is_file():
        found = _read_index(index)
        for file in found:
            if not file.is_file():
                raise DataError(
                    f"{index} names {file.name}, which is missing in {folder}; download the model "
                    "again, or copy all of its files"
                )
        return found
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if pickled := sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]):
        raise DataError(
            f"{folder} holds its weights as {pickled[0].name}, a pickle, which may run any code "
            "when it is read; convert it once where you trust it: AutoModelForCausalLM"
            f".from_pretrained({str(folder)!r}).save_pretrained('converted')"
        )
    raise DataError(
        f"{folder} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}; give the folder of a "
        "Hugging Face model that was saved with save_pretrained"
    )


def _read_index(index: Path) -> list[Path]:
    try:
        weight_map = json.loads(read_small(index, _HEADER_MOST_BYTES))["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{index} is not the index of a model's weights ({reason_of(error)}); download it again"
        ) from error
    if not names:
        raise DataError(f"{index} names no file; download the model again")
    for name in names:
        if Path(name).name != name:
            raise DataError(f"{index} names {name!r}, which is not a file beside it")
    return [index.parent / name for name in names]


def read_header(file: Path) -> dict[str, Entry]:
    """Return where the tensors of one file lie.

    Raises:
        DataError: it cannot be read, is cut off, or is not a safetensors file.
    """
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            size_bytes = os.fstat(stream.fileno()).st_size
            if not 2 <= length <= min(_HEADER_MOST_BYTES, size_bytes - 8):
                raise ValueError("its header is cut off or is none")
            header = json.loads(stream.read(length))
        body = 8 + length
        entries = {
            name: _entry(file, body, value) for name, value in header.items() if name != METADATA
        }
        stop = max((e.start + e.size_bytes for e in entries.values()), default=body)
        if stop > size_bytes:
            raise ValueError(f"{stop} bytes were written, {size_bytes} are there")
        places = sorted((e.start, e.start + e.size_bytes) for e in entries.values())
        if any(end > start for (_, end), (start, _) in itertools.pairwise(places)):
            raise ValueError("tensors lie in the same place")
        return entries
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{file} is not a whole safetensors file ({error}); download or copy it again"
        ) from error


def _entry(file: Path, body: int, value: dict[str, Any]) -> Entry:
    kind, shape = value["dtype"], tuple(int(size) for size in value["shape"])
    if kind not in DTYPES:
        raise ValueError(f"a tensor is of type {kind}; known are {', '.join(DTYPES)}")
    if len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"a tensor has {len(shape)} dimensions")
    first, last = (int(offset) for offset in value["data_offsets"])
    entry = Entry(file, DTYPES[kind], shape, body + first)
    if first < 0 or min(shape, default=0) < 0 or last - first != entry.size_bytes:
        raise ValueError("a tensor's range does not fit its shape")
    return entry


def _read_exactly(stream: BinaryIO, target: Tensor) -> None:
    if target.numel() == 0:
        return
    view = memoryview(target.view(torch.uint8).numpy().data)
    done = 0
    while done < len(view):
        count = stream.readinto(view[done:])  # type: ignore[attr-defined]
        if not count:
            raise OSError("it ends too early; download or copy it again")
        done += count
