"""A data set by name, which the package `datasets` loads: from its hub, its cache, or a folder.

| written | means |
|---|---|
| `datasets:NAME` | split `train`, kept in the package's cache |
| `datasets:NAME:SPLIT`, `datasets:NAME:SUBSET:SPLIT` | another split, a subset |
| `stream:NAME...` | the same, read once and kept nowhere |
| `...[A:B]` | the rows from A to before B; numbers, or percents where nothing is streamed |

NAME is an id such as `org/name`, or a folder with files or with what `save_to_disk` wrote.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from atomtrain.errors import DataError

PREFIXES = ("datasets:", "stream:")
_FORM = re.compile(
    r"(?P<name>[^:\[\]]+)(:(?P<first>[^:\[\]]+))?(:(?P<second>[^:\[\]]+))?"
    r"(\[(?P<begin>([0-9]+%?)?):(?P<end>([0-9]+%?)?)\])?"
)
_SAVED = ("dataset_dict.json", "state.json")
"""Files of what `save_to_disk` wrote."""
_REASON_CHARACTERS = 200
_HUB_S = 10.0
"""How long the hub may take to answer."""


class Named(NamedTuple):
    """What a user wrote, taken apart."""

    name: str
    subset: str | None
    split: str
    part: tuple[str, str]
    """The first row, and the one behind the last: each a number, a percent, or nothing."""
    streamed: bool

    def rows(self, found: Any) -> Iterator[Any]:
        """Return those of the found rows that are meant."""
        begin, end = (_place(bound, found) for bound in self.part)
        return itertools.islice(found, begin, end)


def is_named(spec: str) -> bool:
    """Return whether data are given by name."""
    return spec.startswith(PREFIXES)


def parse_named(spec: str) -> Named:
    """Return what `spec` says; loads nothing.

    Raises:
        DataError: it is not written as the table above says, or the package is not installed.
    """
    named = written(spec)
    if importlib.util.find_spec("datasets") is None:
        raise DataError(
            f"the data set {named.name} needs the package datasets; install it with pip install "
            "'atomtrain[data]'"
        )
    return named


def written(spec: str) -> Named:
    """Return what `spec` says, whether the package is installed or not.

    Raises:
        DataError: it is not written as the table above says.
    """
    prefix, _, rest = spec.partition(":")
    found = _FORM.fullmatch(rest)
    part = ("", "") if found is None else (found["begin"] or "", found["end"] or "")
    streamed = prefix == "stream"
    if found is None or _is_empty(*part):
        percents = "" if streamed else " or percents"
        raise DataError(
            f"--data {spec} is not written as {prefix}:NAME, {prefix}:NAME:SPLIT or "
            f"{prefix}:NAME:SUBSET:SPLIT, each possibly with [A:B] behind it for the rows from A "
            f"to before B, numbers{percents} of which A is the smaller and each may be missing"
        )
    if streamed and "%" in "".join(part):
        raise DataError(
            f"--data {spec}: how many rows a stream has is not known; give numbers, such as "
            f"[:1000], or write datasets:{rest}"
        )
    first, second = found["first"], found["second"]
    subset, split = (first, second) if second else (None, first or "train")
    return Named(found["name"], subset, split, part, streamed)


def _is_empty(begin: str, end: str) -> bool:
    """Return whether no rows can be between two bounds."""
    numbers = [int(bound.removesuffix("%") or 0) for bound in (begin, end)]
    if any(number > 100 for number, b in zip(numbers, (begin, end), strict=True) if "%" in b):
        return True
    alike = begin == "" or begin.endswith("%") == end.endswith("%")
    return end != "" and (numbers[1] == 0 or (alike and numbers[0] >= numbers[1]))


def _place(bound: str, found: Any) -> int | None:
    """Return the number of a row among those found; `None`: nothing bounds them."""
    if not bound.endswith("%"):
        return int(bound) if bound else None
    return round(int(bound.removesuffix("%")) * len(found) / 100)  # as the package does


def named_rows(spec: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield place and values of each row, a few in memory at a time.

    Raises:
        DataError: as `parse_named`; or there is no such data set, subset or split, or it cannot be
            read; says what the package says.
    """
    named = parse_named(spec)
    with _cache_alone_if_out_of_reach(named) as out_of_reach:
        try:
            for number, values in enumerate(named.rows(_loaded(named)), 1):
                yield f"{named.name}: row {number}", dict(values)
        except DataError:
            raise
        except Exception as error:  # of the package, the file system or the network
            hub = out_of_reach and f"; the hub cannot be reached ({out_of_reach})"
            raise DataError(
                f"the data set {named.name!r} cannot be loaded ({_one_line(error)}){hub}"
            ) from error


@contextmanager
def _cache_alone_if_out_of_reach(named: Named) -> Iterator[str]:
    """Ask the hub once whether it is there, and keep to the cache if it is not.

    The packages would try again and again, and tell each time. Yields why it is out of reach.
    """
    import datasets
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    out_of_reach = ""
    if not constants.HF_HUB_OFFLINE and not Path(named.name).expanduser().exists():
        try:
            HfApi().dataset_info(named.name, timeout=_HUB_S)
        except (HfHubHTTPError, ValueError):
            pass  # it answered, or the name cannot be: who loads it tells
        except Exception as error:  # noqa: BLE001 (of several libraries, down to sockets)
            out_of_reach = _one_line(error)
    if not out_of_reach:
        yield ""
        return
    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield out_of_reach
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:_REASON_CHARACTERS] or type(error).__name__


def _loaded(named: Named) -> Any:
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    folder = Path(named.name).expanduser()
    if not any((folder / file).is_file() for file in _SAVED):
        name = str(folder) if folder.is_dir() else named.name
        return datasets.load_dataset(
            name, named.subset, split=named.split, streaming=named.streamed
        )
    # Already as it would be in the cache: read in place, whichever the prefix.
    if named.subset is not None:
        raise DataError(f"{folder} was saved without subsets; write {named.name}:SPLIT")
    found = datasets.load_from_disk(str(folder))
    if not isinstance(found, datasets.DatasetDict):
        return found
    if named.split not in found:
        splits = ", ".join(found)
        raise DataError(f"{folder} has no split {named.split!r}; it has {splits}")
    return found[named.split]
