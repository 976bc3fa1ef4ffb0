"""The sample order: a pure function of (run seed, peer key, position), and nothing else.

The training tokens are cut into windows of one context. In each epoch a peer visits all windows
once, in an order of its own; the grid of windows is shifted by a random part of a context, so
that windows of different epochs have different borders. Sequences are counted from 0 through all
epochs: batch `p` of `n` sequences takes numbers `p*n` to `p*n + n - 1`. A batch therefore may span
two epochs, and the only state is the position: whoever goes on at the position that follows the
last batch used repeats nothing and leaves nothing out. Peers draw independently of each other:
with different keys their orders have nothing in common.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atomtrain.errors import DataError


class Images:
    """What rows have beside tokens, by the names that models give it, in any shapes."""

    def __init__(self, rows: Iterable[Mapping[str, Tensor]]) -> None:
        """Take the tensors of each row, all with the same names."""
        self.rows = tuple(rows)

    def __getitem__(self, rows: slice | Tensor) -> Images:
        numbers = range(len(self.rows))[rows] if isinstance(rows, slice) else _numbers(rows)
        return Images(self.rows[number] for number in numbers)

    def together(self) -> dict[str, Tensor]:
        """Return the rows' tensors one behind the other, padded with zeros but for the first
        dimension to the largest."""
        return {name: _stacked([row[name] for row in self.rows]) for name in self.rows[0]}


def _numbers(rows: Tensor) -> list[int]:
    found: list[int] = (rows.nonzero().flatten() if rows.dtype == torch.bool else rows).tolist()
    return found


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) == 1:  # images are large: no second copy of them
        return tensors[0]
    shape = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    made = tensors[0].new_zeros(sum(len(tensor) for tensor in tensors), *shape)
    start = 0
    for tensor in tensors:
        made[(slice(start, start + len(tensor)), *map(slice, tensor.shape[1:]))] = tensor
        start += len(tensor)
    return made


class Batch(NamedTuple):
    """Sequences of one batch, on the CPU, in memory of their own."""

    inputs: Tensor  # [sequences, context] int64
    labels: Tensor  # [sequences, context] int64; labels[i, t] is the token after inputs[i, t]
    reference: Tensor | None = None
    """`[sequences]` float32: of pairs of answers, what the model to compare with says of each."""
    documents: Tensor | None = None  # [sequences, context] int64
    """Numbers of documents that must not see each other; `None`: each sees those before it."""
    row_labels: Tensor | None = None
    """`[sequences]` int64: each one's class; of answers that are judged 1 of a good one, else 0."""
    images: Images | None = None
    """What the sequences have beside tokens."""

    def part(self, rows: slice | Tensor) -> Batch:
        """Return some sequences of the batch."""
        return Batch(*(None if each is None else each[rows] for each in self))  # type: ignore[arg-type]


def joined(batches: Sequence[Batch]) -> Batch:
    """Return batches, at least one and all of one kind, as one."""
    return Batch(*(_together(parts) for parts in zip(*batches, strict=True)))


def _together(parts: Sequence[Tensor | Images | None]) -> Any:
    images = [part for part in parts if isinstance(part, Images)]
    if images:
        return Images(row for part in images for row in part.rows)
    found = [part for part in parts if isinstance(part, Tensor)]
    return torch.cat(found) if found else None


@dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    """Shape of the batches and seed of their order."""

    context_tokens: int
    """Tokens of a sequence, 1 or more."""
    sequences: int
    """Sequences of a batch, 1 or more."""
    seed: int = 0
    """Seed of the run, the same for all peers."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        _check_shape(self.context_tokens, self.sequences)


class _Epoch(NamedTuple):
    """One pass over the training tokens."""

    offset: int
    """First token of window 0."""
    order: NDArray[np.int64]  # [windows], a permutation


class Sampler:
    """Gives any batch of a peer's endless order by its position. Thread-safe, nothing to save."""

    def __init__(self, tokens: NDArray[Any], config: SamplerConfig, peer_key: str) -> None:
        """Draw from `tokens`, [training tokens], which may be memory-mapped.

        Args:
            tokens: of one dimension, any unsigned integers.
            config: shape and seed.
            peer_key: what tells this peer from others, and stays with it when it comes back.

        Raises:
            DataError: the text is shorter than one context and its last label.
        """
        _check_length(tokens, config.context_tokens, "training")
        self._tokens = tokens
        self._config = config
        self._peer_key = peer_key
        context = config.context_tokens
        self.draws_per_batch = config.sequences
        self.draws_per_epoch: int = windows_per_epoch(len(tokens), context)
        self._offsets = min(context, len(tokens) - self.draws_per_epoch * context)
        # A batch touches two epochs at most, unless it is larger than an epoch.
        self._epoch = lru_cache(maxsize=2)(self._draw_epoch)

    def batch(self, position: int) -> Batch:
        """Return batch number `position`, 0 or more: `[sequences, context]` of inputs and targets.

        Raises:
            DataError: the position is negative.
        """
        if position < 0:
            raise DataError(f"position {position} does not exist; positions start at 0")
        first = position * self._config.sequences
        return self.take(range(first, first + self._config.sequences))

    def take(self, numbers: Sequence[int]) -> Batch:
        """Return the sequences of these numbers, counted through all epochs, in this order."""
        starts = [self._start(number) for number in numbers]
        return _gather(self._tokens, starts, self._config.context_tokens)

    laid = None
    """Running text has no rows."""

    def epoch(self, position: int) -> float:
        """Return how many times the training text has been visited before batch `position`."""
        return position * self._config.sequences / self.draws_per_epoch

    def _start(self, number: int) -> int:
        """Return the first token of sequence `number`."""
        epoch, rank = divmod(number, self.draws_per_epoch)
        drawn = self._epoch(epoch)
        return drawn.offset + int(drawn.order[rank]) * self._config.context_tokens

    def _draw_epoch(self, epoch: int) -> _Epoch:
        bits = _bits(f"{self._config.seed}/{epoch}/{self._peer_key}")
        offset = int(bits.random_raw() % self._offsets)
        return _Epoch(offset, _order(bits, self.draws_per_epoch))


def shuffled(seed: str, count: int) -> NDArray[np.int64]:
    """Return the numbers from 0 to `count - 1` in an order that the seed alone decides."""
    return _order(_bits(seed), count)


def _bits(seed: str) -> np.random.Philox:
    return np.random.Philox(
        key=int.from_bytes(hashlib.sha256(seed.encode()).digest()[:16], "little")
    )


def _order(bits: np.random.Philox, count: int) -> NDArray[np.int64]:
    # Raw bits and a stable sort: numpy promises both for all versions, but no shuffle.
    return np.argsort(bits.random_raw(count), kind="stable").astype(np.int64, copy=False)


def windows_per_epoch(tokens: int, context_tokens: int) -> int:
    """Return the sequences of a pass over so many tokens; 0: they are too few for one."""
    if tokens <= context_tokens:
        return 0
    # One window fewer than fits, so that the grid can be shifted by up to a context.
    return max(1, (tokens - context_tokens) // context_tokens)


def held_out_batches(
    tokens: NDArray[Any], context_tokens: int, sequences: int, limit: int | None = None
) -> Iterator[Batch]:
    """Yield the batches to evaluate on: always the same, spread evenly, all of one shape.

    Windows do not overlap, unless there are too few for a single batch.

    Args:
        tokens: [held-out tokens].
        context_tokens: tokens of a sequence.
        sequences: sequences of a batch.
        limit: at most so many batches; `None` for all whole ones.

    Raises:
        DataError: the held-out text is shorter than one context and its last label.
    """
    _check_shape(context_tokens, sequences)
    if limit is not None and limit < 1:
        raise DataError(f"limit={limit} asks for no held-out batch; it must be 1 or more, or None")
    _check_length(tokens, context_tokens, "held-out")
    batches = max(1, (len(tokens) - 1) // context_tokens // sequences)
    total = min(batches, limit or batches) * sequences
    room = len(tokens) - 1 - context_tokens
    starts = [number * room // max(1, total - 1) for number in range(total)]
    return (
        _gather(tokens, starts[first : first + sequences], context_tokens)
        for first in range(0, total, sequences)
    )


def divided_at(batch: Batch, separator: int) -> Batch:
    """Return a batch of running text whose documents do not see each other.

    The separator behind a document is the first token of the next one, whose first word follows it.
    """
    return batch._replace(documents=(batch.inputs == separator).cumsum(-1))


def _gather(tokens: NDArray[Any], starts: list[int], context: int) -> Batch:
    rows = np.stack([tokens[start : start + context + 1] for start in starts]).astype(np.int64)
    whole = torch.from_numpy(rows)  # [sequences, context + 1]
    return Batch(whole[:, :-1].contiguous(), whole[:, 1:].contiguous())


def _check_shape(context_tokens: int, sequences: int) -> None:
    if context_tokens < 1 or sequences < 1:
        raise DataError(
            f"a batch of {sequences} sequences of {context_tokens} tokens is empty; "
            "both must be 1 or more"
        )


def _check_length(tokens: NDArray[Any], context: int, part: str) -> None:
    if len(tokens) < context + 1:
        raise DataError(
            f"the {part} text has {len(tokens)} tokens, a context of {context} needs at least "
            f"{context + 1}; shorten the context or add text"
        )
