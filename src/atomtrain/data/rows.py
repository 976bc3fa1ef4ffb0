"""Rows of examples: JSON, CSV or parquet files, folders of them, or a data set by name.

The header of a CSV or TSV file names its columns, as keys do in JSON; all values are texts.
"""

from __future__ import annotations

import contextlib
import csv
import glob
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from atomtrain.data.named import is_named, named_rows
from atomtrain.errors import DataError

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
SUFFIXES = (".jsonl", ".ndjson", ".json", *_DELIMITERS, ".parquet")
_MOST_CHARACTERS = 16 << 20
"""Of a row."""
_READ_CHARACTERS = 1 << 20
_JSON_BLANKS = " \t\r\n"
_COMPANIONS = ("readme", "license", "dataset_info", "metadata")
"""Beginnings of the names of files that lie beside rows and are none."""
GLOB_SIGNS = frozenset("*?[")
_BEGINNING_BYTES = 4096
_BLANKS = b" \t\r\n\xef\xbb\xbf"
"""White space, and the mark with which some programs begin UTF-8."""


class Row(NamedTuple):
    """One example as it is stored, and where."""

    place: str
    """File and line (or number of the row), for messages."""
    values: dict[str, Any]
    folder: Path | None = None
    """Of the file; images are named from there."""


def has_rows(spec: str | None) -> bool:
    """Return whether a user's data are rows, not text: by suffix, or by the files of a folder."""
    if spec is None:
        return False
    if is_named(spec):
        return True
    files = _files(spec)
    return bool(files) and all(is_table(file) for file in files)


def is_table(file: Path) -> bool:
    """Return whether a file holds rows, by its suffix."""
    return file.suffix.lower() in SUFFIXES


def read_rows(spec: str) -> Iterator[Row]:
    """Yield the rows of all files in order, a few in memory at a time.

    Args:
        spec: A file with one of `SUFFIXES`, a folder of such, several separated by commas, or a
            data set by name (see `named`).

    Raises:
        DataError: a file cannot be read, or a row is no JSON object, or has not one cell for each
            column; names file and line.
    """
    if is_named(spec):
        yield from itertools.starmap(Row, named_rows(spec))
        return
    for file in _files(spec):
        if file.exists() and not file.is_file():  # whoever reads a pipe may wait for ever
            raise DataError(f"{file} is neither a file nor a folder; write its content to a file")
        suffix = file.suffix.lower()
        if suffix == ".parquet":
            yield from _parquet(file)
        elif suffix in _DELIMITERS:
            yield from _cells(file, _DELIMITERS[suffix])
        else:
            yield from (_array(file) if _is_array(file) else _lines(file))


def _files(spec: str) -> list[Path]:
    found: list[Path] = []
    for part in spec.split(","):
        path = Path(part.strip()).expanduser()
        if GLOB_SIGNS.intersection(part) and not path.exists():
            found += sorted(Path(name) for name in glob.glob(str(path), recursive=True))
        elif path.is_dir():
            found += _inside(path)
        else:
            found.append(path)
    return unique_files(found)


def unique_files(paths: Iterable[Path]) -> list[Path]:
    """Drop files that were named twice; the first place counts."""
    found: dict[str, Path] = {}
    for path in paths:
        found.setdefault(os.path.realpath(path), path)
    return list(found.values())


def visible_files(folder: Path) -> Iterator[Path]:
    """Yield all files of a folder, also in subfolders, none hidden, in no order."""
    for file in folder.rglob("*"):
        hidden = any(name.startswith(".") for name in file.relative_to(folder).parts)
        if file.is_file() and not hidden:
            yield file


def _inside(folder: Path) -> list[Path]:
    """Return the files of a folder; if there are rows among them, without what tells of them."""
    files = sorted(visible_files(folder))
    if any(is_table(file) for file in files):
        return [file for file in files if not file.name.lower().startswith(_COMPANIONS)]
    return files


def _is_array(file: Path) -> bool:
    """Return whether a file is one JSON list; whatever cannot be read is told by who reads it."""
    try:
        with file.open("rb") as content:
            return content.read(_BEGINNING_BYTES).lstrip(_BLANKS)[:1] == b"["
    except OSError:
        return False


def _array(file: Path) -> Iterator[Row]:
    """Yield the rows of one JSON list, some in memory at a time."""
    number = 1
    with _told(file), file.open(encoding="utf-8-sig") as stream:
        rest = _JsonList(stream)
        try:
            ended = rest.sign("[") == "[" and rest.sign("]") == "]"
            while not ended:
                values = rest.value()
                if not isinstance(values, dict):
                    raise DataError(f"{file}: row {number} is not a JSON object; each must be one")
                yield Row(f"{file}: row {number}", values, file.parent)
                number, ended = number + 1, rest.sign(",]") == "]"
            if not rest.is_over():
                raise ValueError("more follows behind the list")
        except (ValueError, RecursionError) as error:
            if isinstance(error, UnicodeDecodeError):
                raise
            raise DataError(
                f"{file}: row {number} is not JSON, or has more than {_MOST_CHARACTERS >> 20} "
                f"million characters ({error}); the file must be one list of objects, or one "
                "object a line"
            ) from error


class _JsonList:
    """Reads a JSON list piece by piece."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._text, self._at = stream, "", 0
        self._decoder = json.JSONDecoder()

    def sign(self, known: str) -> str:
        """Return the next sign if it is one of these; `""` where a list may end and does not.

        Raises:
            ValueError: it is none of them.
        """
        found = "" if self.is_over() else self._text[self._at]
        if found and found in known:
            self._at += 1
            return found
        if known == "]":
            return ""
        raise ValueError(f"{' or '.join(known)} is missing")

    def value(self) -> Any:
        """Return the next value.

        Raises:
            ValueError: it is not JSON.
            RecursionError: it is nested too deep.
        """
        self.is_over()
        while True:
            try:
                value, self._at = self._decoder.raw_decode(self._text, self._at)
            except (ValueError, RecursionError):  # perhaps it is only cut off
                if not self._read():
                    raise
            else:
                return value

    def is_over(self) -> bool:
        """Return whether nothing follows but white space, which is passed over."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in _JSON_BLANKS:
                    return False
                self._at += 1
            if not self._read():
                return True

    def _read(self) -> bool:
        """Read more; return whether there was some, and a row may still be as large."""
        self._text, self._at = self._text[self._at :], 0
        if len(self._text) > _MOST_CHARACTERS:
            return False
        more = self._stream.read(max(_READ_CHARACTERS, len(self._text)))
        self._text += more
        return bool(more)


def _lines(file: Path) -> Iterator[Row]:
    with _told(file), file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(_MOST_CHARACTERS + 1), ""), 1):
            if not line.strip():
                continue
            place = f"{file}:{number}"
            if len(line) > _MOST_CHARACTERS:
                raise DataError(
                    f"{place}: longer than {_MOST_CHARACTERS >> 20} million characters; each line "
                    "must be one example: divide it, or give running text (.txt)"
                )
            try:
                values = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{place}: not JSON ({error}); each line must be one JSON object"
                ) from error
            if not isinstance(values, dict):
                raise DataError(f"{place}: not a JSON object; each line must be one")
            yield Row(place, values, file.parent)


def _cells(file: Path, delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(_MOST_CHARACTERS)  # a cell may be a whole document
    with _told(file), file.open(encoding="utf-8-sig", newline="") as lines:
        found = csv.reader(lines, delimiter=delimiter, strict=True)
        try:
            columns = next(found, [])
            if not all(columns) or len(set(columns)) != len(columns) or not columns:
                raise DataError(
                    f"{file}: its first line must name every column once, as JSON's keys would "
                    f"(text, or prompt and completion); it is {','.join(columns)[:80]!r}"
                )
            for number, cells in enumerate(filter(None, found), 1):  # without empty lines
                place = f"{file}: row {number}"
                if len(cells) != len(columns):
                    raise DataError(
                        f"{place} has {len(cells)} cells, the first line names {len(columns)} "
                        "columns; quote cells that hold the delimiter or a line break"
                    )
                yield Row(place, dict(zip(columns, cells, strict=True)), file.parent)
        except csv.Error as error:
            raise DataError(
                f"{file}:{found.line_num}: not a table ({error}); restore it"
            ) from error


@contextlib.contextmanager
def _told(file: Path) -> Iterator[None]:
    """Name the file that cannot be read."""
    try:
        yield
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
                    yield Row(f"{file}: row {number}", values, file.parent)
    except (OSError, ArrowException) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{file} cannot be read as parquet ({reason}); restore it") from error
