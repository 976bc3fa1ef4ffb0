"""What is learnt from, whichever kind: batches to train on, batches to evaluate on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from atomtrain.data.examples import Examples, Rows, RowSampler, held_out_rows
from atomtrain.data.sampler import (
    Batch,
    Sampler,
    SamplerConfig,
    divided_at,
    held_out_batches,
)
from atomtrain.data.tokens import Tokens


class Batches(Protocol):
    """An endless order of batches, by position."""

    def batch(self, position: int) -> Batch:
        """Return batch number `position`."""
        ...


class Material(Protocol):
    """Text or examples as tokens."""

    def sampler(self, config: SamplerConfig, peer_key: str) -> Batches:
        """Return the batches that a peer trains on."""
        ...

    def held_out(self, context: int, sequences: int, limit: int | None) -> Iterator[Batch]:
        """Yield the batches to evaluate on."""
        ...

    def bits_per_byte(self, context: int, loss_nats_per_token: float) -> float | None:
        """Return a held-out loss in bits per byte of what is predicted; `None` if it is no text."""
        ...


class _Divided(NamedTuple):
    """Batches of running text whose documents do not see each other."""

    whole: Batches
    separator: int

    def batch(self, position: int) -> Batch:
        """See `Batches`."""
        return divided_at(self.whole.batch(position), self.separator)


class TextMaterial(NamedTuple):
    """Running text: every token is predicted."""

    tokens: Tokens
    separator: int | None = None
    """What stands between documents that must not see each other; `None`: they do."""

    def sampler(self, config: SamplerConfig, peer_key: str) -> Batches:
        """See `Material`."""
        sampler = Sampler(self.tokens.train, config, peer_key)
        return sampler if self.separator is None else _Divided(sampler, self.separator)

    def held_out(self, context: int, sequences: int, limit: int | None) -> Iterator[Batch]:
        """See `Material`."""
        batches = held_out_batches(self.tokens.held_out, context, sequences, limit)
        separator = self.separator
        if separator is None:
            return batches
        return (divided_at(batch, separator) for batch in batches)

    def bits_per_byte(self, context: int, loss_nats_per_token: float) -> float:
        """See `Material`."""
        return self.tokens.held_out_bits_per_byte(loss_nats_per_token)


class ExampleMaterial(NamedTuple):
    """Examples: answers are predicted."""

    examples: Examples
    packed: bool
    padding: int

    def sampler(self, config: SamplerConfig, peer_key: str) -> Batches:
        """See `Material`."""
        part = self.examples.train
        rows = Rows(part, config.context_tokens, packed=self.packed, padding=self.padding)
        return RowSampler(rows, config, peer_key)

    def held_out(self, context: int, sequences: int, limit: int | None) -> Iterator[Batch]:
        """See `Material`."""
        return held_out_rows(self._held_out(context), sequences, limit)

    def bits_per_byte(self, context: int, loss_nats_per_token: float) -> float:
        """See `Material`."""
        return self._held_out(context).bits_per_byte(loss_nats_per_token)

    def _held_out(self, context: int) -> Rows:
        # Never packed: each example is judged alone.
        return Rows(
            self.examples.held_out,
            context,
            packed=False,
            padding=self.padding,
            separate=self.packed,  # batches as in training
        )
