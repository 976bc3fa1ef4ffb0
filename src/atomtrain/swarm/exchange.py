"""The butterfly of one round: every member's slice j goes to its owner, a mean comes back.

A member owns several slices of a large fragment. Its neighbours send it their contributions to
these one after the other, over a few streams (*lanes*), and each mean goes back over the same lane
as soon as it is known: contributions and means travel at the same time. What happens to a slice at
its owner is in `owning`; here is the other end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import torch

from atomtrain.swarm.anchors import Snapshot
from atomtrain.swarm.bases import Bases
from atomtrain.swarm.codec import Codec, byte_view, decode_span, decoded, square_of
from atomtrain.swarm.guards import JUDGED_ELEMENTS, Guard, bounded_weights
from atomtrain.swarm.large import Recycler, large_empty
from atomtrain.swarm.messages import BadMessage, Begin, Contribution, Mean
from atomtrain.swarm.outer import OuterUpdate
from atomtrain.swarm.owning import (
    Offload,
    OwnedSlice,
    SliceMean,
    mean_codec,
    mean_digest,
)
from atomtrain.swarm.reduction import SliceReduction
from atomtrain.swarm.slices import (
    Span,
    lanes_per_owner,
    piece_spans,
    slice_spans,
    slices_per_member,
)
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
    bases: Bases | None = None
    """What the means are to be added to, in rounds that have bases."""

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
    update: OuterUpdate = field(default_factory=OuterUpdate)
    """What members apply by themselves, in rounds that have bases."""
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
        self._me = checked_place(setup, begin)
        self._setup = setup
        self._begin = begin
        members = begin.members
        elements = setup.snapshot.values.numel()
        self._each = slices_per_member(elements, len(members))
        self._lanes = lanes_per_owner(len(members), self._each)
        self._spans = slice_spans(elements, len(members) * self._each)
        self._memory = Recycler()
        self._bases = None
        if begin.bases:
            self._bases = Bases(
                setup.snapshot, setup.update, setup.codec, self._spans, setup.offload, self._memory
            )
        self._means: list[SliceMean | None] = [None] * len(self._spans)
        self._values = large_empty(elements)  # what all means lie in
        self._own_square = [0.0] * len(self._spans)
        self._wrong_means: dict[str, str] = {}
        self._channels: list[Channel] = []
        self._served: set[tuple[int, int]] = set()
        first = self._me * self._each
        self._owned = {j: self._own(j) for j in range(first, first + self._each)}
        self._until_s = asyncio.get_running_loop().time() + begin.exchange_s

    def _own(self, index: int) -> OwnedSlice:
        setup, begin, span = self._setup, self._begin, self._spans[index]
        reduction = SliceReduction(span.elements, begin.weights, setup.guard)
        for member, peer_id in enumerate(begin.members):
            if peer_id in setup.excluded:
                reduction.lose(member)
        place, codec = self._place(index), setup.codec
        return OwnedSlice(index, place, begin, codec, setup.offload, reduction, self._memory)

    def _place(self, index: int) -> torch.Tensor:
        start, stop = self._spans[index]
        return self._values[start:stop]

    def _lane(self, owner: int, lane: int) -> range:
        """Return the slices that one lane to, or from, an owner carries, in their order."""
        first = owner * self._each
        return range(first + lane, first + self._each, self._lanes)

    async def run(self) -> ExchangeResult:
        """Return what is held when all slices are, or at the exchange's deadline."""
        members, owned = self._begin.members, self._owned
        others = (i for i in range(len(members)) if i != self._me)
        await together(
            *(self._reduce(j) for j in owned),
            *(self._contribute(i, lane) for i in others for lane in range(self._lanes)),
        )
        slices = owned.values()
        rejected = {members[i]: w for one in slices for i, w in one.reduction.rejected.items()}
        rejected |= self._wrong_means
        everywhere = set.intersection(*(set(one.contributors) for one in slices))
        accepted = tuple(members[i] for i in sorted(everywhere))
        return ExchangeResult(self._means, self._channels, rejected, accepted, self._bases)

    async def serve(self, channel: Channel, header: Contribution) -> None:
        """Take a member's contribution to this member's slices of a lane; answer with the means.

        Raises:
            LinkLost: the member is gone; it does not count, and nobody waits for it.
            BadMessage: it is not in the group, comes twice, or over a lane that there is not.
        """
        peer_id = channel.remote
        if peer_id not in self._begin.members or peer_id == self._setup.peer_id:
            raise BadMessage(f"peer {peer_id[-8:]} is not in this round")
        if header.lane >= self._lanes:
            raise BadMessage(f"there is no lane {header.lane}")
        member = self._begin.members.index(peer_id)
        if (member, header.lane) in self._served:
            raise BadMessage("a second contribution of the same member")
        self._served.add((member, header.lane))
        self._channels.append(channel)
        lane = self._lane(self._me, header.lane)
        slices = [self._owned[j] for j in lane]

        async def take() -> None:
            try:
                for one in slices if header.has_values else ():
                    await one.take(channel, member)
            finally:
                for one in slices:
                    one.lose(member)

        async def answer() -> None:
            for index in lane if self._bases is not None else ():
                assert self._bases is not None
                for piece in await self._bases.own(index):
                    await channel.send_bytes(piece)
            for one in slices:
                await one.answer(channel)

        await together(take(), answer())

    async def _reduce(self, index: int) -> None:
        owned = self._owned[index]
        if self._bases is not None:
            await self._bases.own(index)
            owned.base_digest = self._bases.digests[index]
        self._means[index] = await owned.reduce(self._me, self._own_contribution)

    def _contribution(self, span: Span) -> torch.Tensor:
        if self._bases is not None:
            return self._bases.contribution(span)
        out = self._memory.empty(4 * span.elements).view(torch.float32)
        return self._setup.snapshot.contribution(span, out)

    def _own_contribution(self, index: int) -> torch.Tensor:
        """Return this member's contribution to its own slice, as others would have received it."""
        span = self._spans[index]
        if self._setup.snapshot.lost is None:
            return self._contribution(span)
        pieces = [self._encode_change(piece)[0] for piece in piece_spans(span)]
        return decoded(self._setup.codec, pieces, span.elements)

    async def _contribute(self, owner: int, lane: int) -> None:
        try:
            async with asyncio.timeout_at(self._until_s):
                await self._contribute_to(owner, lane)
        except (LinkLost, BadMessage, TimeoutError):
            for coming in range(self._lanes):
                if (owner, coming) not in self._served:
                    for index in self._lane(self._me, coming):
                        self._owned[index].lose(owner)

    async def _contribute_to(self, owner: int, lane: int) -> None:
        peer_id = self._begin.members[owner]
        try:
            channel = await self._setup.open(peer_id)
        except LinkLost:
            self._setup.on_unreachable(peer_id)
            raise
        self._channels.append(channel)
        slices = self._lane(owner, lane)
        try:
            has_values = self._begin.weights[self._me] > 0
            await channel.send(
                Contribution(round_id=self._begin.round_id, lane=lane, has_values=has_values)
            )
            await together(
                self._send_changes(channel, slices if has_values else ()),
                self._receive_means(channel, slices),
            )
        finally:
            channel.close()

    async def _send_changes(self, channel: Channel, slices: range | tuple[()]) -> None:
        for index in slices:
            if self._bases is not None:
                await self._bases.known(index)
            for piece in piece_spans(self._spans[index]):
                data, square = await self._setup.offload(self._encode_change, piece)
                self._own_square[index] += square
                await channel.send_bytes(data)

    def _encode_change(self, piece: Span) -> tuple[memoryview, float]:
        """Return a piece of this member's contribution as it travels, and its sum of squares."""
        codec, snapshot = self._setup.codec, self._setup.snapshot
        values = self._contribution(piece)
        square = square_of(values) or 0.0
        data = codec.encode(values)
        if snapshot.lost is not None:
            sent = torch.empty_like(values)
            codec.decode(data, sent)
            lost = torch.sub(values, sent, out=snapshot.lost[piece.start : piece.stop])
            if self._bases is not None:  # lost after the step: as a change it counts that much less
                lost.div_(self._setup.update.gain)
        return data, square

    async def _receive_means(self, channel: Channel, slices: range) -> None:
        if self._bases is not None:
            await self._receive_bases(channel, slices, self._bases)
        for index in slices:
            self._means[index] = await self._receive_mean(channel, index)

    async def _receive_bases(self, channel: Channel, slices: range, bases: Bases) -> None:
        try:
            for index in slices:
                await bases.receive(channel, index, self._setup.guard, self._setup.usual_rms)
        except BadMessage:
            self._wrong_means[channel.remote] = "its anchor is far from this peer's"
            raise

    async def _receive_mean(self, channel: Channel, index: int) -> SliceMean | None:
        header = await channel.receive(Mean, self._begin.exchange_s)
        if not header.contributors:
            return None
        if not set(header.contributors) <= set(range(len(self._begin.members))):
            raise BadMessage("a mean over members that are not in the group")
        if len(set(header.contributors)) != len(header.contributors):
            raise BadMessage("a mean that counts a member twice")
        pieces, place = [], self._place(index)
        codec = mean_codec(self._setup.codec, self._begin, index, len(header.contributors))
        for start, stop in piece_spans(Span(0, place.numel())):
            data = (
                byte_view(place[start:stop])  # the bytes are the values
                if codec.exact
                else byte_view(self._memory.empty(codec.encoded_bytes(stop - start)))
            )
            await channel.receive_into(data)
            pieces.append(data)
        held: SliceMean | None = await self._setup.offload(
            self._decode_mean, codec, header, pieces, index
        )
        if held is None:
            self._wrong_means[channel.remote] = "its mean is not what it announced, or too large"
        return held

    def _decode_mean(
        self, codec: Codec, header: Mean, pieces: list[memoryview], index: int
    ) -> SliceMean | None:
        base_digest = "" if self._bases is None else self._bases.digests[index]
        if mean_digest(header.contributors, pieces, base_digest) != header.digest:
            return None
        values = self._place(index)
        try:
            if not codec.exact:
                decode_span(codec, pieces, values)
        except BadMessage:
            return None
        square = square_of(values)
        if square is None or self._mean_too_large(square, index):
            return None
        return SliceMean(values, header.contributors, header.digest, square)

    def _mean_too_large(self, square: float, index: int) -> bool:
        weights, elements = self._begin.weights, self._spans[index].elements
        if elements < JUDGED_ELEMENTS:
            return False
        mean_rms, own_rms = ((s / elements) ** 0.5 for s in (square, self._own_square[index]))
        # Before a mean was seen, only one of another size than the anchor is not believed.
        usual_rms = self._setup.usual_rms or self._anchor_rms(index)
        return self._setup.guard.mean_too_large(
            mean_rms, own_rms, usual_rms, weights[self._me], weights
        )

    def _anchor_rms(self, index: int) -> float:
        start, stop = self._spans[index]
        square = square_of(self._setup.snapshot.anchor.values[start:stop]) or 0.0
        return float((square / (stop - start)) ** 0.5)


def checked_place(setup: ExchangeSetup, begin: Begin) -> int:
    """Return this member's index in the group.

    Raises:
        BadMessage: the group is not one this member can be in.
    """
    members = begin.members
    if setup.peer_id not in members or len(set(members)) != len(members):
        raise BadMessage("the group does not contain this member, or one of them twice")
    if {len(begin.weights), len(begin.late)} != {len(members)} or begin.exchange_s <= 0:
        raise BadMessage("the group has no weights or no time")
    place = members.index(setup.peer_id)
    claimed = [*begin.weights]
    claimed[place] = setup.snapshot.weight
    if begin.weights != bounded_weights(claimed):
        raise BadMessage("the leader changed this member's weight, or lets one weigh too much")
    return place


async def together(*work: Coroutine[Any, Any, None]) -> None:
    """Do several things at the same time; the first that fails ends all."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
