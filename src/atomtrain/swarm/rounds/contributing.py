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
from atomtrain.swarm.codecs.codec import square_of
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

    def encode(self, piece: Span, index: int, *, again: bool = False) -> Encoded:
        """Return a piece of the contribution to a slice; keep what encoding loses, if that counts.

        With `again` it is kept already. May run on a worker.
        """
        values = self._values(piece)
        square = square_of(values) or 0.0
        data = self._encode(values, piece, again=again)
        sent_square = square if self._setup.codec.exact else square_of(values) or 0.0
        return Encoded(data, square, leaves_of(values, self._spans[index].elements), sent_square)

    async def _made(self, index: int) -> Own:
        if self._bases is not None:
            await self._bases.own(index)
        made: Own = await self._setup.offload(self._make, index)
        return made

    def _make(self, index: int) -> Own:
        """Make the own contribution as others would have received it."""
        span = self._spans[index]
        values = self._values(span)
        if self._setup.snapshot.lost is not None:
            for piece in piece_spans(span):
                self._encode(values[piece.start - span.start : piece.stop - span.start], piece)
        return committed(values)

    def _values(self, span: Span) -> torch.Tensor:
        if self._bases is not None:
            return self._bases.contribution(span)
        out = self._memory.empty(4 * span.elements).view(torch.float32)
        return self._setup.snapshot.contribution(span, out)

    def _encode(self, values: torch.Tensor, piece: Span, *, again: bool = False) -> memoryview:
        """Return the bytes of values, which become what these decode to; keep what is lost."""
        codec, lost = self._setup.codec, None if again else self._setup.snapshot.lost
        if lost is not None:
            lost = lost[piece.start : piece.stop]
        data = codec.encode(values, None if codec.exact else values, lost)
        if lost is not None and self._bases is not None:
            lost.div_(self._setup.update.gain)  # lost after the step: as a change it counts less
        return data
