"""Examples with answers: tokens in flat arrays, rows of equal length, batches by position.

A row is one example, cut at the context and padded behind its end, or (packed) several, one after
the other. Attention is causal, so what lies behind an example's end changes nothing in it. Packed
examples do not see each other: batches say which example each token belongs to.
"""

from __future__ import annotations

import bisect
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atomtrain.data.chat import Example
from atomtrain.data.corpus import HELD_OUT_EVERY, HELD_OUT_INDEX, HoldOut
from atomtrain.data.sampler import Batch, Images, SamplerConfig, shuffled
from atomtrain.errors import DataError

if TYPE_CHECKING:
    from atomtrain.data.picture_chat import Look
    from atomtrain.data.pictures import Picture

IGNORED = -100
"""A label that does not count."""
_LEAST = 2


@dataclass(frozen=True)
class Part:
    """Some examples, one behind the other."""

    tokens: NDArray[np.uint32]  # [tokens of all]
    answers: NDArray[np.bool_]  # [tokens of all]
    starts: NDArray[np.int64]  # [examples + 1]
    answer_bytes: NDArray[np.int64]  # [examples]
    row_labels: NDArray[np.int64] | None  # [examples], see `Example`
    pictures: list[tuple[Picture, ...]]  # [examples], or empty

    @property
    def count(self) -> int:
        """Number of examples."""
        return len(self.answer_bytes)


@dataclass(frozen=True)
class Counts:
    """What was read."""

    kinds: dict[str, int]
    """Examples by kind."""
    examples: int
    tokens: int
    answer_tokens: int
    longest_tokens: int
    sha256: str
    """Of all tokens and marks, in order."""


class Examples:
    """All examples: those to train on, and every twentieth to evaluate on."""

    def __init__(
        self,
        examples: Iterable[Example],
        name: str,
        together: int = 1,
        hold_out: HoldOut = "some",
    ) -> None:
        """Read all examples.

        Args:
            examples: In the order of the data.
            name: Of the data, for messages.
            together: So many, one after the other, stay together: 2 of pairs.
            hold_out: What of them to evaluate on.

        Raises:
            DataError: there are none, or fewer than two (twos) of which one is to be held out.
        """
        kinds: Counter[str] = Counter()
        digest = hashlib.sha256()
        parts: tuple[list[Example], list[Example]] = ([], [])
        count = tokens = answers = longest = 0
        for example in examples:
            held_out = hold_out == "all" or (
                hold_out == "some" and count // together % HELD_OUT_EVERY == HELD_OUT_INDEX
            )
            parts[held_out].append(example)
            kinds[example.kind] += 1
            digest.update(np.asarray(example.tokens, np.uint32).tobytes())
            digest.update(np.asarray(example.answers, np.bool_).tobytes())
            digest.update(b"" if example.label is None else b"label %d" % example.label)
            digest.update("".join(picture.sha256 for picture in example.pictures).encode())
            count, tokens = count + 1, tokens + len(example.tokens)
            answers, longest = answers + sum(example.answers), max(longest, len(example.tokens))
        least = _LEAST if hold_out == "some" else 1
        if count < least * together:
            raise DataError(
                f"{name} has {count // together} examples, at least {least} are needed; add some"
            )
        if hold_out == "some" and not parts[1]:  # few examples: the last one is held out
            parts[1].extend(parts[0][-together:])
            del parts[0][-together:]
        self.train, self.held_out = _joined(parts[0]), _joined(parts[1])
        self.counts = Counts(dict(kinds), count, tokens, answers, longest, digest.hexdigest())


class Laid(NamedTuple):
    """How rows of data lie in sequences; those of several sources add up."""

    rows: int
    sequences: int
    cut: int
    """Rows that are longer than a sequence."""
    dropped: int
    """Rows whose answers all lie beyond a sequence, or that have none."""
    tokens: int
    """Of rows, as far as they are within sequences."""
    room_tokens: int
    """Of the sequences."""

    @property
    def filled_share(self) -> float:
        """The share of the sequences' tokens that are not padding."""
        return self.tokens / self.room_tokens


class Rows:
    """Rows of a part: `context` inputs, and as many labels, of which only answers count."""

    def __init__(
        self,
        part: Part,
        context: int,
        *,
        packed: bool,
        padding: int,
        separate: bool | None = None,
        look: Look | None = None,
    ) -> None:
        """Divide a part into rows.

        Args:
            part: The examples.
            context: Tokens of a row.
            packed: Whether rows may hold several examples.
            padding: Token behind the last example of a row.
            separate: Whether batches say which example each token belongs to; `None`: if rows hold
                several.
            look: How rows with pictures get their images.

        Raises:
            DataError: no example has an answer within the context.
        """
        self._part, self._context, self._padding, self._look = part, context, padding, look
        self._separate = packed if separate is None else separate
        lengths = np.minimum(np.diff(part.starts), context + 1)
        counted = [index for index in range(part.count) if self._counts(index)]
        self.cut = int((np.diff(part.starts) > context + 1).sum())
        """Examples that are longer than a row."""
        self.dropped = part.count - len(counted)
        """Examples whose answers all lie beyond a row, or that have none; or pictures do."""
        if not counted:
            what = "an answer" if look is None else "an answer and its images"
            raise DataError(
                f"no example has {what} within {context} tokens; raise --context, or shorten "
                "the examples"
            )
        self.rows = _packed(lengths, counted, context + 1) if packed else [[i] for i in counted]
        self.laid = Laid(
            rows=part.count,
            sequences=len(self.rows),
            cut=self.cut,
            dropped=self.dropped,
            tokens=int(lengths[counted].sum()),
            room_tokens=len(self.rows) * (context + 1),
        )

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, rows: Sequence[int]) -> Batch:
        """Return inputs, labels and documents of some rows, `[rows, context]`, and the rows' own
        labels, `[rows]`, where they have some."""
        width = self._context + 1
        tokens = np.full((len(rows), width), self._padding, np.int64)
        marks = np.zeros((len(rows), width), bool)
        documents = np.zeros((len(rows), width), np.int64)
        for line, row in enumerate(rows):
            at = 0
            for number, index in enumerate(self.rows[row]):
                start, stop = self._range(index)
                tokens[line, at : at + stop - start] = self._part.tokens[start:stop]
                marks[line, at : at + stop - start] = self._part.answers[start:stop]
                marks[line, at] = False  # the first token follows nothing of its example
                documents[line, at : at + stop - start] = number
                at += stop - start
            documents[line, at:] = len(self.rows[row])  # padding is a document of its own
        labels = np.where(marks, tokens, IGNORED)[:, 1:]
        inputs: Tensor = torch.from_numpy(tokens[:, :-1].copy())
        own = torch.from_numpy(documents[:, :-1].copy()) if self._separate else None
        of_rows = None
        if self._part.row_labels is not None:
            first = [self.rows[row][0] for row in rows]
            of_rows = torch.from_numpy(self._part.row_labels[first])
        targets, images = torch.from_numpy(labels.copy()), None
        if self._look is not None:
            pictures = [self._part.pictures[self.rows[row][0]] for row in rows]
            images = Images(map(self._look.images, pictures))
            if self._look.types is not None:
                types = (inputs == self._look.image_number).long().split(1)
                pairs = zip(images.rows, types, strict=True)
                images = Images({**seen, self._look.types: marks} for seen, marks in pairs)
        return Batch(inputs, targets, documents=own, row_labels=of_rows, images=images)

    def largest(self, count: int) -> list[int]:
        """Return so many rows, those with most tokens that stand for pictures."""
        assert self._look is not None
        tokens, starts = self._part.tokens == self._look.image_number, self._part.starts
        sizes = [int(tokens[starts[row[0]] : starts[row[0] + 1]].sum()) for row in self.rows]
        order = np.argsort(-np.asarray(sizes), kind="stable").tolist()
        return [order[index % len(order)] for index in range(count)]

    def predicted(self) -> tuple[int, int]:
        """Return how many tokens are predicted, and the bytes of their text."""
        counted = [index for row in self.rows for index in row]
        tokens = sum(int(self._part.answers[slice(*self._range(i))].sum()) for i in counted)
        return tokens, sum(int(self._part.answer_bytes[i]) for i in counted)

    def _range(self, index: int) -> tuple[int, int]:
        start, stop = int(self._part.starts[index]), int(self._part.starts[index + 1])
        return start, min(stop, start + self._context + 1)

    def _counts(self, index: int) -> bool:
        start, stop = self._range(index)
        if self._look is not None:  # a picture of which a part is cut off fits no features
            behind = self._part.tokens[start + self._context : self._part.starts[index + 1]]
            if bool((behind == self._look.image_number).any()):
                return False
        return bool(self._part.answers[start + 1 : stop].any())


class Drawn(Protocol):
    """What batches are drawn from: rows, or pairs of them."""

    laid: Laid

    def __len__(self) -> int: ...

    def batch(self, rows: Sequence[int], /) -> Batch:
        """Return some of them, in this order."""
        ...


class RowSampler:
    """Gives any batch of a peer's endless order by its position, as `Sampler` does for text."""

    def __init__(self, rows: Drawn, config: SamplerConfig, peer_key: str) -> None:
        """Draw from all rows; each epoch has an order of its own."""
        self._rows, self._config, self._peer_key = rows, config, peer_key
        self.draws_per_batch, self.draws_per_epoch = config.sequences, len(rows)
        self.laid: Laid | None = rows.laid
        self._order = lru_cache(maxsize=2)(self._draw)

    def batch(self, position: int) -> Batch:
        """Return batch number `position`, 0 or more."""
        first = position * self._config.sequences
        return self.take(range(first, first + self._config.sequences))

    def take(self, numbers: Sequence[int]) -> Batch:
        """Return the rows of these numbers, counted through all epochs, in this order."""
        places = [divmod(number, len(self._rows)) for number in numbers]
        return self._rows.batch([int(self._order(epoch)[rank]) for epoch, rank in places])

    def epoch(self, position: int) -> float:
        """Return how many times all rows have been visited before batch `position`."""
        return position * self._config.sequences / len(self._rows)

    def _draw(self, epoch: int) -> NDArray[np.int64]:
        return shuffled(f"{self._config.seed}/{epoch}/{self._peer_key}", len(self._rows))


def held_out_rows(rows: Drawn, sequences: int, limit: int | None = None) -> Iterator[Batch]:
    """Yield batches to evaluate on: always the same, of one shape; the last begins anew."""
    batches = max(1, len(rows) // sequences)
    for number in range(min(batches, limit or batches)):
        first = number * sequences
        yield rows.batch([n % len(rows) for n in range(first, first + sequences)])


def _joined(examples: Sequence[Example]) -> Part:
    starts = np.cumsum([0, *(len(example.tokens) for example in examples)])
    labels = [example.label for example in examples if example.label is not None]
    return Part(
        np.fromiter((t for e in examples for t in e.tokens), np.uint32, int(starts[-1])),
        np.fromiter((a for e in examples for a in e.answers), np.bool_, int(starts[-1])),
        starts.astype(np.int64),
        np.array([example.answer_bytes for example in examples], np.int64),
        np.array(labels, np.int64) if labels else None,
        [example.pictures for example in examples if example.pictures],
    )


def _packed(lengths: NDArray[np.int64], wanted: Sequence[int], width: int) -> list[list[int]]:
    """Put examples into rows: best fit decreasing within windows of the data's order.

    The longest goes first, each into the fullest row with room for it (Johnson 1974). What shares a
    row keeps its order.
    """
    rows: list[list[int]] = []
    for first in range(0, len(wanted), _WINDOW):
        room: list[tuple[int, int]] = []  # sorted: tokens left, index of the row
        for index in sorted(wanted[first : first + _WINDOW], key=lambda i: -int(lengths[i])):
            length = int(lengths[index])
            place = bisect.bisect_left(room, (length, -1))
            if place < len(room):
                left, row = room.pop(place)
            else:
                left, row = width, len(rows)
                rows.append([])
            rows[row].append(index)
            bisect.insort(room, (left - length, row))
    return [sorted(row) for row in rows]


_WINDOW = 8192
"""Examples: enough to fill rows well, few enough to be quick."""
