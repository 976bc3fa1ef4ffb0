"""What a member contributes to an exchange: made, encoded, and hashed to be sealed.

Its contributions to its own slices are made once. It is bound to them before it hears of any other,
and they are shown to whoever audits its means.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import torch

from atomtrain.swarm.anchors.buffer_pool import BufferPool
from atomtrain.swarm.codecs.codec import decoded, square_of
from atomtrain.swarm.codecs.slices import Span, piece_spans
from atomtrain.swarm.rounds.bases import Bases
from atomtrain.swarm.rounds.commitments import Own, committed, leaves_of
from atomtrain.swarm.rounds.exchange_setup import ExchangeSetup
from atomtrain.swarm.transport.messages import Begin


class Encoded(NamedTuple):
    """A piece of a contribution as it travels."""

    data: memoryview
    square: float
    """Sum of the squares of what was encoded."""
    leaves: list[bytes]
    """Hashes of what it decodes to."""
    sent_square: float
    """Sum of the squares of that."""


class Contributions:
    """One member's contributions; belongs to the event loop that runs."""

    def __init__(
        self,
        setup: ExchangeSetup,
        begin: Begin,
        spans: Sequence[Span],
        bases: Bases | None,
        memory: BufferPool,
    ) -> None:
        """Have made none yet; `spans` are those of the slices, values come to `memory`."""
        self._setup, self._spans, self._bases, self._memory = setup, spans, bases, memory
        self._counts = begin.weights[begin.members.index(setup.peer_id)] > 0
        self._own: dict[int, asyncio.Future[Own]] = {}

    async def own(self, index: int) -> Own | None:
        """Return this member's contribution to its own slice; None if it has no weight."""
        if not self._counts:
            return None
        if index not in self._own:
            self._own[index] = asyncio.ensure_future(self._made(index))
        return await asyncio.shield(self._own[index])

    def forget(self) -> None:
        """Let go of them: nobody will ask to see them."""
        self._own.clear()

    def encode(self, piece: Span, index: int) -> Encoded:
        """Return a piece of the contribution to a slice; keep what encoding loses, if that counts.

        May run on a worker.
        """
        codec, snapshot = self._setup.codec, self._setup.snapshot
        values = self._values(piece)
        square = square_of(values) or 0.0
        data = codec.encode(values)
        sent, sent_square = values, square
        if not codec.exact:
            sent = torch.empty_like(values)
            codec.decode(data, sent)
            sent_square = square_of(sent) or 0.0
        if snapshot.lost is not None:
            self._keep_lost(values, sent, snapshot.lost[piece.start : piece.stop])
        return Encoded(data, square, leaves_of(sent, self._spans[index].elements), sent_square)

    async def _made(self, index: int) -> Own:
        if self._bases is not None:
            await self._bases.own(index)
        made: Own = await self._setup.offload(self._make, index)
        return made

    def _make(self, index: int) -> Own:
        """Make the own contribution as others would have received it."""
        span = self._spans[index]
        if self._setup.snapshot.lost is None:
            return committed(self._values(span))
        pieces = [self.encode(piece, index).data for piece in piece_spans(span)]
        return committed(decoded(self._setup.codec, pieces, span.elements))

    def _values(self, span: Span) -> torch.Tensor:
        if self._bases is not None:
            return self._bases.contribution(span)
        out = self._memory.empty(4 * span.elements).view(torch.float32)
        return self._setup.snapshot.contribution(span, out)

    def _keep_lost(self, values: torch.Tensor, sent: torch.Tensor, into: torch.Tensor) -> None:
        lost = torch.sub(values, sent, out=into)
        if self._bases is not None:  # lost after the step: as a change it counts that much less
            lost.div_(self._setup.update.gain)
