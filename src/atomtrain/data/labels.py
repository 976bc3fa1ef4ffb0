"""Rows with a text and the label of its class.

| kind | keys of a row |
|---|---|
| labelled | `text`, and `label`: a text, a whole number, or true or false |

A label is known by its name: 2 and "2" are one, true is "true". A row without text or label (null,
NaN or blank) says nothing that could be learnt.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from atomtrain.data.dialogues import NoAnswerError, text_of
from atomtrain.data.rows import Row
from atomtrain.errors import DataError, nearest

_SHOWN = 20


class Labelled(NamedTuple):
    """A text, and what it is."""

    row: Row
    text: str
    label: str

    def number(self, known: Mapping[str, int]) -> int:
        """Return the number of the label.

        Raises:
            DataError: it is not among those that are known; names file, line, and these.
        """
        if self.label not in known:
            raise DataError(
                f"{self.row.place}: has the label {self.label!r:.40}; the model knows "
                f"{in_words(list(known))}.{nearest(self.label, known)} Correct it, or begin a "
                "new head, which knows the labels of --data"
            )
        return known[self.label]


def understand_labelled(row: Row) -> Labelled:
    """Return a row's text and label.

    Raises:
        NoAnswerError: it has no text, or no label.
        DataError: it lacks a key, or one of the two is of another type; names file and line.
    """
    if not {"text", "label"} <= row.values.keys():
        keys = ", ".join(map(repr, row.values)) or "nothing"
        raise DataError(
            f"{row.place}: has {keys}; classes are learnt from rows with text and label"
        )
    return Labelled(row, text_of(row, "text"), _name(row, row.values["label"]))


def _name(row: Row, label: Any) -> str:
    if label is None or (isinstance(label, float) and math.isnan(label)):
        raise NoAnswerError(f"{row.place}: 'label' is empty")
    if isinstance(label, float) and label.is_integer():
        label = int(label)  # a table's column with gaps
    if isinstance(label, int):  # a bool as well
        return json.dumps(label)
    if not isinstance(label, str):
        raise DataError(
            f"{row.place}: 'label' must be a text or a whole number, not {str(label)[:40]}"
        )
    if not label.strip():
        raise NoAnswerError(f"{row.place}: 'label' is empty")
    return label


def in_words(labels: Sequence[str]) -> str:
    """Return the first labels on one line."""
    shown = [f"{label!r:.40}" for label in labels[:_SHOWN]]
    return ", ".join([*shown, "..."] if len(labels) > _SHOWN else shown)


def labels_in(rows: Iterable[Labelled], what: str) -> list[str]:
    """Return the labels of rows, in the order of their names; whole numbers in theirs.

    Args:
        rows: All that is to be learnt.
        what: The data, for messages.

    Raises:
        DataError: there is one label only.
    """
    found = {row.label for row in rows}
    if len(found) < 2:
        raise DataError(
            f"all rows of {what} have the label {min(found)!r:.40}; at least two labels are needed "
            "to tell apart: add rows of another"
        )
    if all(label.isdecimal() and label.isascii() for label in found):
        return sorted(found, key=lambda label: (int(label), label))
    return sorted(found)
