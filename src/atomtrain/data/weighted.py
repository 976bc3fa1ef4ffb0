"""A source of data as a user names it, with a weight: `chats.jsonl:2`.

A weight says how many times a source's rows (or windows of its text) count in an epoch: 2 as if the
source were named twice, 0.5 half of it in each epoch, the other half in the next one. It is not a
share of the mixture.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from atomtrain.data.corpus import check_files, named_files
from atomtrain.data.dialogues import NoAnswerError, understand
from atomtrain.data.named import PREFIXES, is_named, parse_named
from atomtrain.data.rows import GLOB_SIGNS, has_rows, read_rows
from atomtrain.errors import DataError

_MOST_WEIGHT = 1000.0


class Weighted(NamedTuple):
    """One source."""

    spec: str
    """Files or a data set, as `read_rows` and `read_corpus` take them."""
    weight: float = 1.0


def parse_weighted(given: str) -> Weighted:
    """Return source and weight.

    Raises:
        DataError: the weight is not a number above 0 and at most 1000.
    """
    spec, _, said = given.rpartition(":")
    whole = Weighted(given)
    if not spec or f"{spec}:" in PREFIXES or _exists(given):
        return whole
    try:
        weight = float(said)
    except ValueError:
        if is_named(given) or not (_exists(spec) or GLOB_SIGNS.intersection(spec)):
            return whole  # a split; or a path, which whoever reads it tells
        weight = math.nan
    if not 0 < weight <= _MOST_WEIGHT:
        raise DataError(
            f"--data {given} has the weight {said!r}; a weight is a number above 0 and at most "
            f"{_MOST_WEIGHT:g}, such as {spec}:2 (its rows count twice in an epoch)"
        )
    return Weighted(spec, weight)


def check_sources(
    data: Sequence[str], validation: str | None, *, conversations: bool = False
) -> None:
    """Refuse what can be seen at once: weights, files that are not there, first rows.

    Args:
        data: Sources with weights.
        validation: One without, or None.
        conversations: Rows are texts or conversations, as opposed to pairs, labels and the like.

    Raises:
        DataError: says which.
    """
    if validation is not None and _is_share(validation):
        raise DataError(
            f"--validation {validation} is a share, not a file; without --validation a twentieth "
            "of the data is held out"
        )
    for spec in [*(parse_weighted(each).spec for each in data), *filter(None, [validation])]:
        if is_named(spec):
            parse_named(spec)
        else:
            check_files(spec)
            _check_first_row(spec, conversations=conversations)
    check_apart(data, validation)


def _is_share(validation: str) -> bool:
    with suppress(ValueError):
        return 0 <= float(validation) < 1 and not _exists(validation)
    return False


def check_apart(data: Sequence[str], validation: str | None) -> None:
    """Refuse a file that a run would learn from and be judged by.

    That is one of the validation that is among the data, or, where the data hold out a part, one
    that lies in two sources: each holds out rows of its own.

    Args:
        data: Sources with weights.
        validation: One without, or None.

    Raises:
        DataError: names the file.
    """
    specs = list(dict.fromkeys(parse_weighted(each).spec for each in data))
    if len(specs) + (validation is not None) < 2:
        return
    sources = {spec: {spec} if is_named(spec) else named_files(spec) for spec in specs}
    judged = set[str]()
    if validation is not None:
        judged = {validation} if is_named(validation) else named_files(validation)
    seen: dict[str, str] = {}
    for spec, files in sources.items():
        for file in sorted(files):
            if file in judged:
                raise DataError(
                    f"--validation {validation}: {file} is among the files of --data {spec}, which "
                    "are learnt; leave it out there"
                )
            if file in seen and validation is None:
                raise DataError(
                    f"{file} is in --data {seen[file]} and in --data {spec}; what one holds out to "
                    "be judged by the other would learn: name it once, with a weight to have it "
                    "count more"
                )
            seen.setdefault(file, spec)


def _check_first_row(spec: str, *, conversations: bool) -> None:
    if not has_rows(spec) or ".parquet" in spec.lower():  # which takes long to open
        return
    row = next(read_rows(spec), None)
    if row is not None and conversations:
        with suppress(NoAnswerError):  # such a row is skipped later
            understand(row)


def _exists(path: str) -> bool:
    return os.path.exists(os.path.expanduser(path))
