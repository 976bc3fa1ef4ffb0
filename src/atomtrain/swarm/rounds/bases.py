"""Exchanges of members whose anchors differ: what they contribute is where a step would lead them.

Member i takes the outer step by itself, from its own anchor with its own velocity, to y_i. A slice
has a *base* r, its owner's anchor as it travels, which the owner sends first; members contribute
y_i - r, and the new anchor is r plus the mean, which is the mean of the y_i whatever r is. See
docs/groups.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch

from atomtrain.errors import BadMessage
from atomtrain.swarm.anchors.anchors import Digest, Snapshot
from atomtrain.swarm.anchors.buffer_pool import BufferPool, pooled_empty
from atomtrain.swarm.anchors.updates import OuterUpdate, Place, rows_of
from atomtrain.swarm.codecs.codec import (
    Codec,
    base_codec,
    byte_view,
    decode_span,
    encode_span,
    square_of,
)
from atomtrain.swarm.codecs.slices import Span, piece_spans
from atomtrain.swarm.membership.guards import JUDGED_ELEMENTS, Guard
from atomtrain.swarm.rounds.owning import Offload
from atomtrain.swarm.transport.transport import Channel

_ROUNDING = 2.0**-10
"""More than a base's rounding may change a number, relative to it."""


def stepped(snapshot: Snapshot, update: OuterUpdate, span: Span) -> torch.Tensor:
    """Return where a member's own outer step leads its anchor in a span; 1-D float32."""
    return _step(snapshot, update, span, _velocity(snapshot, update, span))


def velocity_after(
    snapshot: Snapshot, update: OuterUpdate, contributed: Sequence[Span]
) -> torch.Tensor | None:
    """Return a member's velocity after a round that took its contribution in these spans."""
    if not update.rows:
        return None
    whole = _velocity(snapshot, update, Span(0, snapshot.values.numel()))
    assert whole is not None
    for span in contributed:
        _step(snapshot, update, span, rows_of(whole, update.rows, span))
    return whole


def _velocity(snapshot: Snapshot, update: OuterUpdate, span: Span) -> torch.Tensor | None:
    """Return a copy of a member's velocity in a span, which a step may change."""
    if not update.rows:
        return None
    if snapshot.velocity is None:
        return torch.zeros(span.elements)
    return snapshot.velocity[span.start : span.stop].clone()


def _step(
    snapshot: Snapshot, update: OuterUpdate, span: Span, velocity: torch.Tensor | None
) -> torch.Tensor:
    anchor = snapshot.anchor.values[span.start : span.stop]
    out = torch.empty_like(anchor)
    on_time_share = 0.0 if snapshot.late else 1.0
    place = Place(snapshot.fragment, span.start, snapshot.anchor.stamp.version)
    update.apply(anchor, snapshot.contribution(span), velocity, on_time_share, out=out, place=place)
    return out


class Bases:
    """The bases of an exchange as one member comes to know them, slice by slice."""

    def __init__(
        self,
        snapshot: Snapshot,
        update: OuterUpdate,
        codec: Codec,
        spans: Sequence[Span],
        offload: Offload,
        memory: BufferPool,
    ) -> None:
        """Know none yet; `codec` is that of changes, `spans` are those of the slices.

        Bases come to `memory`.
        """
        self.values = pooled_empty(snapshot.values.numel())
        """1-D float32, one base after the other; undefined where none is known."""
        self.digests = [""] * len(spans)
        """Hash of each base as it travels."""
        self.strange: set[str] = set()
        """Members whose bases were too far from this member's anchor to be believed."""
        self._snapshot, self._update, self._offload = snapshot, update, offload
        self._codec = base_codec(codec)
        self._spans = spans
        self._memory = memory
        self._known = [asyncio.Event() for _ in spans]
        self._believed = [True] * len(spans)
        self._own: dict[int, asyncio.Future[list[memoryview]]] = {}

    async def known(self, index: int) -> bool:
        """Wait until the base of a slice is known; say whether it is to be believed."""
        await self._known[index].wait()
        return self._believed[index]

    def believed(self, index: int) -> bool:
        """Say whether the base of a slice has come, and is to be believed."""
        return self._known[index].is_set() and self._believed[index]

    def contribution(self, span: Span) -> torch.Tensor:
        """Return what this member contributes in a span whose base is known."""
        return stepped(self._snapshot, self._update, span).sub_(self.values[span.start : span.stop])

    async def own(self, index: int) -> list[memoryview]:
        """Return this member's base of a slice that it owns, as it travels."""
        if index not in self._own:
            encoding = self._offload(self._encode, index)
            self._own[index] = asyncio.ensure_future(encoding)
        pieces = await asyncio.shield(self._own[index])
        self._known[index].set()
        return pieces

    async def receive(self, channel: Channel, index: int, guard: Guard, usual_rms: float) -> None:
        """Take the base of a slice off its owner's stream.

        Raises:
            LinkLost: the owner is gone.
        """
        pieces = []
        for start, stop in piece_spans(Span(0, self._spans[index].elements)):
            data = byte_view(self._memory.empty(self._codec.encoded_bytes(stop - start)))
            await channel.receive_into(data)
            pieces.append(data)
        believed = await self._offload(self._take, index, pieces, guard, usual_rms)
        if not believed:
            self.strange.add(channel.remote)
        self._believed[index] = believed
        self._known[index].set()

    def _encode(self, index: int) -> list[memoryview]:
        start, stop = self._spans[index]
        anchor = self._snapshot.anchor.values[start:stop]
        pieces = encode_span(self._codec, anchor, sent=self.values[start:stop])
        self.digests[index] = _digest(pieces)
        return pieces

    def _take(self, index: int, pieces: list[memoryview], guard: Guard, usual_rms: float) -> bool:
        start, stop = self._spans[index]
        base, anchor = self.values[start:stop], self._snapshot.anchor.values[start:stop]
        try:
            decode_span(self._codec, pieces, base)
        except BadMessage:
            return False
        self.digests[index] = _digest(pieces)
        drift = square_of(base - anchor)
        if drift is None:
            return False
        if not guard.limit or stop - start < JUDGED_ELEMENTS:
            return True
        # Siblings are less than one round's changes apart, and bases rounded. Before a mean was
        # seen, and without a change, only bases of another size than the anchor are not believed.
        size = square_of(anchor) or 0.0
        change = square_of(self._snapshot.contribution(self._spans[index])) or 0.0
        usual = usual_rms**2 * (stop - start) or size
        return not usual or drift <= guard.limit**2 * max(usual, change) + _ROUNDING**2 * size


def _digest(pieces: list[memoryview]) -> str:
    digest = Digest()
    for piece in pieces:
        digest.update(piece)
    return digest.text()
