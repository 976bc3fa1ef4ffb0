"""The butterfly of one round: every member's slice j goes to its owner, a mean comes back.

One stream for each member and slice carries both: contribution there, mean back. Small groups cut
several slices for each owner, so that several streams fill a link with a long round trip. What
happens to a slice at its owner is in `owning`; here is the other end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import torch

from atomtrain.swarm.anchors import Snapshot
from atomtrain.swarm.codec import Codec, all_finite, decode_span
from atomtrain.swarm.guards import Guard
from atomtrain.swarm.messages import BadMessage, Begin, Contribution, Mean
from atomtrain.swarm.owning import Offload, OwnedSlice, SliceMean, mean_codec, mean_digest
from atomtrain.swarm.reduction import SliceReduction
from atomtrain.swarm.slices import Span, piece_spans, slice_spans, slices_per_member
from atomtrain.swarm.transport import Channel, LinkLost


@dataclass
class ExchangeResult:
    """What a member holds after the exchange."""

    means: list[SliceMean | None]
    channels: list[Channel]
    """Streams that were used; some may still be sending this member's mean."""
    rejected: dict[str, str] = field(default_factory=dict)
    """Peers whose contribution, or mean, this member did not accept on evidence, and why."""
    accepted: tuple[str, ...] = ()
    """Peers whose contribution is in each of this member's slices."""

    @property
    def digests(self) -> tuple[str, ...]:
        """Digest of each slice's mean, empty where it is missing."""
        return tuple("" if mean is None else mean.digest for mean in self.means)


@dataclass(frozen=True, kw_only=True)
class ExchangeSetup:
    """What an exchange needs besides the group."""

    peer_id: str
    snapshot: Snapshot
    codec: Codec
    open: Callable[[str], Awaitable[Channel]]
    """Opens a stream on which this protocol has been agreed."""
    offload: Offload
    guard: Guard = field(default_factory=Guard)
    usual_rms: float = 0.0
    """Root mean square of the fragment's last mean; 0: there was none."""
    excluded: frozenset[str] = frozenset()
    """Peers whose contributions this member does not count."""
    on_unreachable: Callable[[str], None] = field(default=lambda _: None)
    """Told about members to which no stream can be opened."""


class Exchange:
    """One member's part in the exchange: contributor to all slices, owner of some."""

    def __init__(self, setup: ExchangeSetup, begin: Begin) -> None:
        """Take the place of `setup.peer_id` in the group.

        Raises:
            BadMessage: the group is not one this member can be in.
        """
        members = begin.members
        if setup.peer_id not in members or len(set(members)) != len(members):
            raise BadMessage("the group does not contain this member, or one of them twice")
        if len(begin.weights) != len(members) or begin.exchange_s <= 0:
            raise BadMessage("the group has no weights or no time")
        self._setup = setup
        self._begin = begin
        self._me = members.index(setup.peer_id)
        if begin.weights[self._me] != setup.snapshot.weight:
            raise BadMessage("the leader changed this member's weight")
        elements = setup.snapshot.values.numel()
        self._each = slices_per_member(elements, len(members))
        self._spans = slice_spans(elements, len(members) * self._each)
        self._wrong_means: dict[str, str] = {}
        self._channels: list[Channel] = []
        first = self._me * self._each
        self._owned = {j: self._own(j) for j in range(first, first + self._each)}
        self._until_s = asyncio.get_running_loop().time() + begin.exchange_s

    def _own(self, index: int) -> OwnedSlice:
        setup, begin, span = self._setup, self._begin, self._spans[index]
        reduction = SliceReduction(span.elements, begin.weights, setup.guard)
        for member, peer_id in enumerate(begin.members):
            if peer_id in setup.excluded:
                reduction.lose(member)
        return OwnedSlice(index, span, begin, setup.codec, setup.offload, reduction)

    async def run(self) -> ExchangeResult:
        """Return what is held when all slices are, or at the exchange's deadline."""
        tasks = {
            j: asyncio.create_task(self._reduce(j) if j in self._owned else self._contribute(j))
            for j in range(len(self._spans))
        }
        try:
            means = [await task for task in tasks.values()]
        finally:
            for task in tasks.values():
                task.cancel()
        members, owned = self._begin.members, self._owned.values()
        rejected = {members[i]: w for one in owned for i, w in one.reduction.rejected.items()}
        rejected |= self._wrong_means
        everywhere = set.intersection(*(set(one.contributors) for one in owned))
        accepted = tuple(members[i] for i in sorted(everywhere))
        return ExchangeResult(means, self._channels, rejected, accepted)

    async def serve(self, channel: Channel, header: Contribution) -> None:
        """Take a member's contribution to one of this member's slices; answer with the mean.

        Raises:
            LinkLost: the member is gone; it does not count, and nobody waits for it.
            BadMessage: it is not in the group, comes twice, or to a slice that is not here.
        """
        peer_id = channel.remote
        if peer_id not in self._begin.members or peer_id == self._setup.peer_id:
            raise BadMessage(f"peer {peer_id[-8:]} is not in this round")
        if header.slice_index not in self._owned:
            raise BadMessage(f"slice {header.slice_index} is not this member's")
        self._channels.append(channel)
        member = self._begin.members.index(peer_id)
        await self._owned[header.slice_index].serve(channel, member, header)

    async def _reduce(self, index: int) -> SliceMean | None:
        return await self._owned[index].reduce(self._me, self._own_contribution)

    def _own_contribution(self, span: Span) -> torch.Tensor:
        """Return this member's contribution to its own slice, as others would have received it."""
        if self._setup.snapshot.lost is None:
            return self._setup.snapshot.contribution(span)
        values = torch.empty(span.elements)
        for start, stop in piece_spans(Span(0, span.elements)):
            data = self._encode_change(Span(span.start + start, span.start + stop))
            self._setup.codec.decode(data, values[start:stop])
        return values

    async def _contribute(self, index: int) -> SliceMean | None:
        owner = index // self._each
        try:
            async with asyncio.timeout_at(self._until_s):
                return await self._contribute_to(index, self._begin.members[owner])
        except (LinkLost, BadMessage, TimeoutError):
            for one in self._owned.values():
                if owner not in one.serving:
                    one.lose(owner)
            return None

    async def _contribute_to(self, index: int, peer_id: str) -> SliceMean | None:
        try:
            channel = await self._setup.open(peer_id)
        except LinkLost:
            self._setup.on_unreachable(peer_id)
            raise
        self._channels.append(channel)
        try:
            has_values = self._begin.weights[self._me] > 0
            await channel.send(
                Contribution(
                    round_id=self._begin.round_id, slice_index=index, has_values=has_values
                )
            )
            if has_values:
                await self._send_change(channel, self._spans[index])
            return await self._receive_mean(channel, index)
        finally:
            channel.close()

    async def _send_change(self, channel: Channel, span: Span) -> None:
        for piece in piece_spans(span):
            data = await self._setup.offload(self._encode_change, piece)
            await channel.send_bytes(data)

    def _encode_change(self, piece: Span) -> memoryview:
        codec, snapshot = self._setup.codec, self._setup.snapshot
        values = snapshot.contribution(piece)
        data = codec.encode(values)
        if snapshot.lost is not None:
            sent = torch.empty_like(values)
            codec.decode(data, sent)
            torch.sub(values, sent, out=snapshot.lost[piece.start : piece.stop])
        return data

    async def _receive_mean(self, channel: Channel, index: int) -> SliceMean | None:
        header = await channel.receive(Mean, self._begin.exchange_s)
        if not header.contributors:
            return None
        if not set(header.contributors) <= set(range(len(self._begin.members))):
            raise BadMessage("a mean over members that are not in the group")
        if len(set(header.contributors)) != len(header.contributors):
            raise BadMessage("a mean that counts a member twice")
        pieces = []
        codec = mean_codec(self._setup.codec, self._begin, index, len(header.contributors))
        for piece in piece_spans(self._spans[index]):
            data = bytearray(codec.encoded_bytes(piece.elements))
            await channel.receive_into(memoryview(data))
            pieces.append(memoryview(data))
        held: SliceMean | None = await self._setup.offload(
            self._decode_mean, codec, header, pieces, self._spans[index]
        )
        if held is None:
            self._wrong_means[channel.remote] = "its mean is not what it announced, or too large"
        return held

    def _decode_mean(
        self, codec: Codec, header: Mean, pieces: list[memoryview], span: Span
    ) -> SliceMean | None:
        if mean_digest(header.contributors, pieces) != header.digest:
            return None
        values = torch.empty(span.elements)
        try:
            decode_span(codec, pieces, values)
        except BadMessage:
            return None
        if not all_finite(values) or self._mean_too_large(values, span):
            return None
        return SliceMean(values, header.contributors, header.digest)

    def _mean_too_large(self, mean: torch.Tensor, span: Span) -> bool:
        weights, own = self._begin.weights, self._setup.snapshot.contribution(span)
        usual_rms = self._setup.usual_rms
        return self._setup.guard.mean_too_large(mean, own, usual_rms, weights[self._me], weights)
