"""Rows of examples: JSON lines, parquet files, folders of them, or a data set by name."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from atomtrain.errors import DataError

SUFFIXES = (".jsonl", ".parquet")
_GLOB_SIGNS = frozenset("*?[")
NAMED = "datasets:"
"""Before the name of a data set that the package `datasets` loads."""


class Row(NamedTuple):
    """One example as it is stored, and where."""

    place: str
    """File and line (or number of the row), for messages."""
    values: dict[str, Any]


def has_rows(spec: str | None) -> bool:
    """Return whether a user's data are rows, not text: by suffix, or by the files of a folder."""
    if spec is None:
        return False
    if spec.startswith(NAMED):
        return True
    files = _files(spec)
    return bool(files) and all(file.suffix in SUFFIXES for file in files)


def read_rows(spec: str) -> Iterator[Row]:
    """Yield the rows of all files in order, a few in memory at a time.

    Args:
        spec: A `.jsonl` or `.parquet` file, a folder of such, several separated by commas, or
            `datasets:NAME` (with the split `train`; `datasets:NAME:SPLIT` takes another).

    Raises:
        DataError: a file cannot be read, or a line is no JSON object; names file and line.
    """
    if spec.startswith(NAMED):
        yield from _named(spec.removeprefix(NAMED))
        return
    for file in _files(spec):
        yield from (_lines(file) if file.suffix == ".jsonl" else _parquet(file))


def _files(spec: str) -> list[Path]:
    found: list[Path] = []
    for part in spec.split(","):
        path = Path(part.strip()).expanduser()
        if _GLOB_SIGNS.intersection(part) and not path.exists():
            found += sorted(Path(name) for name in glob.glob(str(path), recursive=True))
        elif path.is_dir():
            inside = (file for file in path.rglob("*") if file.is_file())
            found += sorted(file for file in inside if not file.name.startswith("."))
        else:
            found.append(path)
    return found


def _lines(file: Path) -> Iterator[Row]:
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                place = f"{file}:{number}"
                try:
                    values = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise DataError(
                        f"{place}: not JSON ({error}); each line must be one JSON object"
                    ) from error
                if not isinstance(values, dict):
                    raise DataError(f"{place}: not a JSON object; each line must be one")
                yield Row(place, values)
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}); check --data") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 (offset {error.start}); convert it") from error


def _parquet(file: Path) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise DataError(
            f"reading {file} needs the package pyarrow; install it with pip install "
            "'atomtrain[data]'"
        ) from None
    number = 0
    try:
        with parquet.ParquetFile(file) as source:
            for batch in source.iter_batches(batch_size=256):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(f"{file}: row {number}", values)
    except (OSError, ArrowException) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{file} cannot be read as parquet ({reason}); restore it") from error


def _named(name: str) -> Iterator[Row]:
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"the data set {name} needs the package datasets; install it with pip install "
            "'atomtrain[data]'"
        ) from None
    name, _, split = name.partition(":")
    try:
        found = datasets.load_dataset(name, split=split or "train")
    except Exception as error:  # of the package, the file system or the network
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"the data set {name!r} cannot be loaded ({reason})") from error
    for number, values in enumerate(found, 1):
        yield Row(f"{name}: row {number}", dict(values))
