"""Several sources as one: each place of an epoch is one source's, drawn by weight and seed.

In an epoch source `i` gets `round(weight * what it has)` places, spread at random. What stands at
its places is the next of its own endless order, in which it is seen as a whole before anything of
it is seen again. So an epoch is a pure function of seed, peer and its number, and with a weight of
0.5 two epochs see all of a source.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from atomtrain.data.examples import Laid
from atomtrain.data.material import Draws, Material
from atomtrain.data.sampler import Batch, SamplerConfig, joined, shuffled
from atomtrain.data.tokens import bits_per_byte
from atomtrain.errors import DataError


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
        """Return a held-out loss in bits per byte of what is predicted; `None` if it is no text."""
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
        """How the rows of all sources lie in sequences; `None` of running text."""
        laid = [part.laid for part in self._parts if part.laid is not None]
        return Laid(*(sum(numbers) for numbers in zip(*laid, strict=True))) if laid else None

    def batch(self, position: int) -> Batch:
        """Return batch number `position`, 0 or more."""
        first = position * self.draws_per_batch
        return self.take(range(first, first + self.draws_per_batch))

    def take(self, numbers: Sequence[int]) -> Batch:
        """Return the draws of these numbers, counted through all epochs, in this order."""
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
        """Return how many epochs lie before batch `position`."""
        return position * self.draws_per_batch / self.draws_per_epoch

    def _draw_epoch(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return of each place of an epoch the source, and which of the source's it is."""
        order = shuffled(f"{self._seed}/{epoch}/{self._peer_key}/sources", self.draws_per_epoch)
        sources = np.repeat(np.arange(len(self._places)), self._places)[order]
        nth = np.empty_like(sources)
        for source, places in enumerate(self._places):
            nth[sources == source] = np.arange(places)
        return sources, nth
