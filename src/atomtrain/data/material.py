"""What is learnt from (text, examples, pairs of answers; several at once): batches by position.

Pairs of answers are two rows each, the better answer first: rows `2 i` and `2 i + 1` of a batch
belong together. With them goes what a reference says, which is the model before it learnt anything
from the pairs: the sum of the logarithms of an answer's probabilities.

Of several sources each place of an epoch is one source's, drawn by weight and seed. Source `i` gets
`round(weight * what it has)` places, spread at random. What stands at its places is the next of its
own endless order, in which it is seen as a whole before anything of it is seen again. So an epoch
is a pure function of seed, peer and its number, and with a weight of 0.5 two epochs see all of a
source.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from atomtrain.data.examples import Examples, Laid, Part, Rows, RowSampler, held_out_rows
from atomtrain.data.picture_chat import Look
from atomtrain.data.sampler import (
    Batch,
    Sampler,
    SamplerConfig,
    divided_at,
    held_out_batches,
    joined,
    shuffled,
)
from atomtrain.data.tokens import Tokens, bits_per_byte
from atomtrain.errors import DataError


class Draws(Protocol):
    """An endless order of sequences (of pairs: of twos), by number; and of batches, by position."""

    draws_per_batch: int
    draws_per_epoch: int

    @property
    def laid(self) -> Laid | None:
        """How rows lie in sequences; `None` of running text."""
        ...

    def batch(self, position: int) -> Batch:
        """Return batch number `position`."""
        ...

    def take(self, numbers: Sequence[int]) -> Batch:
        """Return the draws of these numbers, counted through all epochs, in this order."""
        ...

    def epoch(self, position: int) -> float:
        """Return how many times the data were seen before this position."""
        ...


class Material(Protocol):
    """One source of text or examples as tokens."""

    def sampler(self, config: SamplerConfig, peer_key: str) -> Draws:
        """Return the batches that a peer trains on."""
        ...

    def held_out(self, context: int, sequences: int, limit: int | None) -> Iterator[Batch]:
        """Yield the batches to evaluate on."""
        ...

    def predicted(self, context: int) -> tuple[int, int] | None:
        """Return how many held-out tokens are predicted, and the bytes of their text; `None` if the
        loss is not that of a text."""
        ...


class _Divided(Sampler):
    """Batches of running text whose documents do not see each other."""

    separator: int

    def take(self, numbers: Sequence[int]) -> Batch:
        return divided_at(super().take(numbers), self.separator)


class TextMaterial(NamedTuple):
    """Running text: every token is predicted."""

    tokens: Tokens
    separator: int | None = None
    """What stands between documents that must not see each other; `None`: they do."""

    def sampler(self, config: SamplerConfig, peer_key: str) -> Draws:
        if self.separator is None:
            return Sampler(self.tokens.train, config, peer_key)
        divided = _Divided(self.tokens.train, config, peer_key)
        divided.separator = self.separator
        return divided

    def held_out(self, context: int, sequences: int, limit: int | None) -> Iterator[Batch]:
        batches = held_out_batches(self.tokens.held_out, context, sequences, limit)
        separator = self.separator
        if separator is None:
            return batches
        return (divided_at(batch, separator) for batch in batches)

    def predicted(self, context: int) -> tuple[int, int]:
        return len(self.tokens.held_out), self.tokens.held_out_bytes


class ExampleMaterial(NamedTuple):
    """Examples: answers are predicted."""

    examples: Examples
    packed: bool
    padding: int
    look: Look | None = None
    """How rows with pictures get their images."""

    def sampler(self, config: SamplerConfig, peer_key: str) -> Draws:
        return RowSampler(self.train(config.context_tokens), config, peer_key)

    def train(self, context: int) -> Rows:
        """Return the rows to learn from."""
        return Rows(
            self.examples.train,
            context,
            packed=self.packed,
            padding=self.padding,
            look=self.look,
        )

    def parts(self, context: int) -> list[Rows]:
        """Return the rows to learn from and those to evaluate on, where there are some."""
        found = [self.train(context)] if self.examples.train.count else []
        with suppress(DataError):  # a small source beside others may hold out none that fits
            found.append(self._held_out(context))
        return found

    def held_out(self, context: int, sequences: int, limit: int | None) -> Iterator[Batch]:
        return held_out_rows(self._held_out(context), sequences, limit)

    def predicted(self, context: int) -> tuple[int, int] | None:
        if self.examples.held_out.row_labels is not None:
            return None
        return self._held_out(context).predicted()

    def _held_out(self, context: int) -> Rows:
        # Never packed: each example is judged alone.
        return Rows(
            self.examples.held_out,
            context,
            packed=False,
            padding=self.padding,
            separate=self.packed,  # batches as in training
            look=self.look,
        )


class References(NamedTuple):
    """What the reference says of each answer, `[2 * pairs]` float32, nats."""

    train: NDArray[np.float32]
    held_out: NDArray[np.float32]


class PairRows:
    """The pairs of a part of which both answers are within the context."""

    def __init__(
        self,
        part: Part,
        context: int,
        *,
        padding: int,
        references: NDArray[np.float32] | None = None,
    ) -> None:
        """Divide a part into pairs.

        Args:
            part: Better and other answers in turns.
            context: Tokens of a row.
            padding: Token behind an answer.
            references: `[2 * pairs]`, see `References`; of none, batches carry none.

        Raises:
            DataError: no pair has both answers within the context.
        """
        self._rows = Rows(part, context, packed=False, padding=padding)
        places = {row[0]: place for place, row in enumerate(self._rows.rows)}
        self._pairs = [
            (places[index], places[index + 1])
            for index in range(0, part.count, 2)
            if index in places and index + 1 in places
        ]
        self.cut = self._rows.cut
        """Answers that are longer than a row."""
        self.dropped = part.count // 2 - len(self._pairs)
        """Pairs of which an answer lies beyond a row."""
        if not self._pairs:
            raise DataError(
                f"no pair has both answers within {context} tokens; raise --context, or shorten "
                "the prompts"
            )
        self._references = references
        self.laid = self._rows.laid._replace(
            rows=part.count // 2, sequences=2 * len(self._pairs), dropped=self.dropped
        )

    def __len__(self) -> int:
        return len(self._pairs)

    def batch(self, pairs: Sequence[int], /) -> Batch:
        """Return inputs, labels and references of some pairs, two rows each."""
        found = self._rows.batch([row for pair in pairs for row in self._pairs[pair]])
        if self._references is None:
            return found
        picked = self._references.reshape(-1, 2)[list(pairs)].reshape(-1)
        return found._replace(reference=torch.from_numpy(picked.copy()))


class PairMaterial(NamedTuple):
    """Pairs of answers: the better one is to become the more probable one."""

    examples: Examples
    padding: int
    references: References | None = None
    """Known as soon as the model to compare with was asked."""

    def sampler(self, config: SamplerConfig, peer_key: str) -> RowSampler:
        """See `Material`; a batch has half as many pairs as sequences."""
        return RowSampler(self.train(config.context_tokens), _pairs_of(config), peer_key)

    def held_out(self, context: int, sequences: int, limit: int | None) -> Iterator[Batch]:
        return held_out_rows(self.judged(context), max(1, sequences // 2), limit)

    def predicted(self, context: int) -> None:
        """Return nothing: the loss is not that of a text."""

    def parts(self, context: int) -> tuple[PairRows | None, PairRows | None]:
        """Return the pairs to learn from and those to evaluate on, `None` where there are none."""
        return (
            self.train(context) if self.examples.train.count else None,
            self.judged(context) if self.examples.held_out.count else None,
        )

    def train(self, context: int) -> PairRows:
        """Return the pairs to learn from."""
        known = None if self.references is None else self.references.train
        return PairRows(self.examples.train, context, padding=self.padding, references=known)

    def judged(self, context: int) -> PairRows:
        """Return the pairs to evaluate on."""
        known = None if self.references is None else self.references.held_out
        return PairRows(self.examples.held_out, context, padding=self.padding, references=known)


def _pairs_of(config: SamplerConfig) -> SamplerConfig:
    return dataclasses.replace(config, sequences=config.sequences // 2)


class Mixture(NamedTuple):
    """All that a run learns from, and what it is judged by."""

    sources: tuple[Material, ...]
    weights: tuple[float, ...]
    validation: Material | None = None
    """Of its own; `None`: what the sources hold out."""

    def sampler(self, config: SamplerConfig, peer_key: str) -> Draws:
        """Return the batches that a peer trains on.

        Raises:
            DataError: a source has too little for one sequence.
        """
        if self.weights == (1.0,):
            return self.sources[0].sampler(config, peer_key)
        parts = [
            source.sampler(config, f"{peer_key}/{index}")
            for index, source in enumerate(self.sources)
        ]
        return MixedSampler(parts, self.weights, config.seed, peer_key)

    def held_out(self, context: int, sequences: int, limit: int | None) -> Iterator[Batch]:
        """Return the batches to evaluate on, of all sources in turns.

        Raises:
            DataError: there is too little for one sequence.
        """
        found = itertools.zip_longest(*self._judged(context, sequences, limit))
        batches = (batch for turn in found for batch in turn if batch is not None)
        return itertools.islice(batches, limit)

    def _judged(self, context: int, sequences: int, limit: int | None) -> list[Iterator[Batch]]:
        if self.validation is not None:
            return [self.validation.held_out(context, sequences, limit)]
        found, short = [], None
        for source in self.sources:
            try:
                found.append(source.held_out(context, sequences, limit))
            except DataError as error:  # a small source beside others holds out too little
                short = error
        if not found and short is not None:
            raise short
        return found

    def bits_per_byte(self, context: int, loss_nats_per_token: float) -> float | None:
        """Return a held-out loss in bits per byte of what is predicted, `None` unless text is."""
        judged = self.sources if self.validation is None else (self.validation,)
        predicted = [source.predicted(context) for source in judged]
        known = [each for each in predicted if each is not None]
        if len(known) < len(predicted):
            return None
        tokens, n_bytes = (sum(numbers) for numbers in zip(*known, strict=True))
        return bits_per_byte(loss_nats_per_token, tokens, max(1, n_bytes))


class MixedSampler:
    """Gives any batch of several sources by its position, as a sampler of one does."""

    def __init__(
        self, parts: Sequence[Draws], weights: Sequence[float], seed: int, peer_key: str
    ) -> None:
        """Mix samplers of one config; a source has one place in an epoch at least."""
        self._parts, self._seed, self._peer_key = parts, seed, peer_key
        self._places = [
            max(1, round(weight * part.draws_per_epoch))
            for part, weight in zip(parts, weights, strict=True)
        ]
        self.draws_per_batch = parts[0].draws_per_batch
        self.draws_per_epoch = sum(self._places)
        self._epoch = lru_cache(maxsize=2)(self._draw_epoch)

    @property
    def laid(self) -> Laid | None:
        laid = [part.laid for part in self._parts if part.laid is not None]
        return Laid(*(sum(numbers) for numbers in zip(*laid, strict=True))) if laid else None

    def batch(self, position: int) -> Batch:
        first = position * self.draws_per_batch
        return self.take(range(first, first + self.draws_per_batch))

    def take(self, numbers: Sequence[int]) -> Batch:
        wanted: list[list[int]] = [[] for _ in self._parts]  # of each source: its own numbers
        places: list[list[int]] = [[] for _ in self._parts]  # and where they go
        for place, number in enumerate(numbers):
            epoch, rank = divmod(number, self.draws_per_epoch)
            source, nth = (int(drawn[rank]) for drawn in self._epoch(epoch))
            wanted[source].append(epoch * self._places[source] + nth)
            places[source].append(place)
        whole = joined([p.take(n) for p, n in zip(self._parts, wanted, strict=True) if n])
        each = len(whole.inputs) // len(numbers)  # a pair takes two sequences
        back = torch.tensor([p for of_source in places for p in of_source]).argsort()
        rows = (back[:, None] * each + torch.arange(each)).flatten()
        return whole.part(rows)

    def epoch(self, position: int) -> float:
        return position * self.draws_per_batch / self.draws_per_epoch

    def _draw_epoch(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return of each place of an epoch the source, and which of the source's it is."""
        order = shuffled(f"{self._seed}/{epoch}/{self._peer_key}/sources", self.draws_per_epoch)
        sources = np.repeat(np.arange(len(self._places)), self._places)[order]
        nth = np.empty_like(sources)
        for source, places in enumerate(self._places):
            nth[sources == source] = np.arange(places)
        return sources, nth
