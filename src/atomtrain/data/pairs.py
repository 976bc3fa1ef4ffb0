"""Pairs of answers: two rows each, the better answer first, with what a reference says of them.

Rows `2 i` and `2 i + 1` of a batch belong together. The reference is the model before it learnt
anything from the pairs; what it says is the sum of the logarithms of an answer's probabilities.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from atomtrain.data.examples import Examples, Part, Rows, RowSampler, held_out_rows
from atomtrain.data.sampler import Batch, SamplerConfig
from atomtrain.errors import DataError


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
        """See `Material`."""
        return held_out_rows(self.judged(context), max(1, sequences // 2), limit)

    def bits_per_byte(self, context: int, loss_nats_per_token: float) -> None:
        """Return nothing: the loss is not that of a text."""

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
