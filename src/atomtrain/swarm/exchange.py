"""The butterfly of one round: every member's slice j goes to owner j, owner j's mean comes back.

One stream per ordered pair of members carries both: contribution there, mean back. What happens to
a slice is decided by `SliceReduction`; here are the streams and their deadlines.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from atomtrain.swarm.anchors import Snapshot
from atomtrain.swarm.codec import Codec, all_finite, decode_span, encode_span
from atomtrain.swarm.guards import Guard
from atomtrain.swarm.messages import BadMessage, Begin, Contribution, Mean
from atomtrain.swarm.reduction import SliceReduction
from atomtrain.swarm.slices import Span, piece_spans, slice_spans
from atomtrain.swarm.transport import Channel, LinkLost


class Offload(Protocol):
    """Runs heavy arithmetic where it does not hold up the event loop."""

    def __call__(self, work: Callable[..., Any], *args: Any) -> Awaitable[Any]:
        """Return what `work(*args)` returns."""
        ...


@dataclass(frozen=True)
class SliceMean:
    """A slice's mean as it came off the wire, and whose contributions are in it."""

    values: torch.Tensor
    contributors: tuple[int, ...]
    digest: str


@dataclass
class ExchangeResult:
    """What a member holds after the exchange."""

    means: list[SliceMean | None]
    channels: list[Channel]
    """Streams that were used; some may still be sending this member's mean."""
    rejected: dict[str, str] = field(default_factory=dict)
    """Peers whose contribution, or mean, this member did not accept on evidence, and why."""
    accepted: tuple[str, ...] = ()
    """Peers whose contribution is in this member's slice."""

    @property
    def digests(self) -> tuple[str, ...]:
        """Digest of each slice's mean, empty where it is missing."""
        return tuple("" if mean is None else mean.digest for mean in self.means)


class _Outbound(NamedTuple):
    header: Mean
    pieces: list[memoryview]


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
    excluded: frozenset[str] = frozenset()
    """Peers whose contributions this member does not count."""
    on_unreachable: Callable[[str], None] = field(default=lambda _: None)
    """Told about members to which no stream can be opened."""


class Exchange:
    """One member's part in the exchange: contributor to all slices, owner of one."""

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
        self._spans = slice_spans(setup.snapshot.values.numel(), len(members))
        self._reduction = SliceReduction(self._spans[self._me].elements, begin.weights, setup.guard)
        for member, peer_id in enumerate(members):
            if peer_id in setup.excluded:
                self._reduction.lose(member)
        self._accepted: tuple[int, ...] = ()
        self._wrong_means: dict[str, str] = {}
        self._adding = asyncio.Lock()
        self._changed = asyncio.Event()
        self._serving: set[int] = set()
        self._channels: list[Channel] = []
        loop = asyncio.get_running_loop()
        self._mean: asyncio.Future[_Outbound] = loop.create_future()
        self._collect_until_s = loop.time() + begin.exchange_s / 2
        self._until_s = loop.time() + begin.exchange_s

    async def run(self) -> ExchangeResult:
        """Return what is held when all slices are, or at the exchange's deadline."""
        others = [j for j in range(len(self._spans)) if j != self._me]
        tasks = {j: asyncio.create_task(self._contribute(j)) for j in others}
        try:
            means: list[SliceMean | None] = [None] * len(self._spans)
            means[self._me] = await self._own_slice()
            for j, task in tasks.items():
                means[j] = await task
        finally:
            for task in tasks.values():
                task.cancel()
        members = self._begin.members
        rejected = {members[i]: why for i, why in self._reduction.rejected.items()}
        rejected |= self._wrong_means
        accepted = tuple(members[i] for i in self._accepted)
        return ExchangeResult(means, self._channels, rejected, accepted)

    async def serve(self, channel: Channel, header: Contribution) -> None:
        """Take a member's contribution to this member's slice, and answer with the mean.

        Raises:
            LinkLost: the member is gone; it does not count, and nobody waits for it.
            BadMessage: it is not in the group, or comes twice.
        """
        member = self._index(channel.remote)
        if member in self._serving:
            raise BadMessage("a second contribution of the same member")
        self._serving.add(member)
        self._channels.append(channel)
        try:
            if header.has_values:
                values = await self._receive(channel, member)
                if values is not None:
                    async with self._adding:
                        await self._setup.offload(self._reduction.add, member, values)
        finally:
            self._lose(member)
        async with asyncio.timeout_at(self._until_s):
            out = await asyncio.shield(self._mean)
        await channel.send(out.header)
        for piece in out.pieces:
            await channel.send_bytes(piece)

    def _index(self, peer_id: str) -> int:
        if peer_id not in self._begin.members or peer_id == self._setup.peer_id:
            raise BadMessage(f"peer {peer_id[-8:]} is not in this round")
        return self._begin.members.index(peer_id)

    def _lose(self, member: int) -> None:
        self._reduction.lose(member)
        self._changed.set()

    async def _receive(self, channel: Channel, member: int) -> torch.Tensor | None:
        """Return a contribution, or None if it does not count.

        It is read to its end in any case: its sender must get to the mean, for a slice that one
        member lacks is not committed.
        """
        span = self._spans[self._me]
        codec = self._setup.codec
        values = torch.empty(span.elements) if member in self._reduction.awaited else None
        for start, stop in piece_spans(Span(0, span.elements)):
            data = bytearray(codec.encoded_bytes(stop - start))
            await channel.receive_into(memoryview(data))
            try:
                if values is not None:
                    await self._setup.offload(codec.decode, data, values[start:stop])
            except BadMessage as error:
                self._reduction.reject(member, str(error))
                values = None
        return values

    async def _own_slice(self) -> SliceMean | None:
        span = self._spans[self._me]
        if self._begin.weights[self._me]:
            own = await self._setup.offload(self._own_contribution, span)
            async with self._adding:
                await self._setup.offload(self._reduction.add, self._me, own)
        try:
            async with asyncio.timeout_at(self._collect_until_s):
                while not self._reduction.complete:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass  # who has not delivered by now does not count
        async with self._adding:
            contributors, mean = await self._setup.offload(self._reduction.close)
        self._accepted = contributors
        if mean is None:
            self._mean.set_result(_Outbound(Mean(contributors=(), digest=""), []))
            return None
        pieces, held = await self._setup.offload(self._encode_mean, contributors, mean)
        header = Mean(contributors=contributors, digest=held.digest)
        self._mean.set_result(_Outbound(header, pieces))
        return held if all_finite(held.values) else None

    def _own_contribution(self, span: Span) -> torch.Tensor:
        """Return this member's contribution to its own slice, as others would have received it."""
        if self._setup.snapshot.lost is None:
            return self._setup.snapshot.contribution(span)
        values = torch.empty(span.elements)
        for start, stop in piece_spans(Span(0, span.elements)):
            data = self._encode_change(Span(span.start + start, span.start + stop))
            self._setup.codec.decode(data, values[start:stop])
        return values

    def _mean_codec(self, contributors: tuple[int, ...]) -> Codec:
        seed = hashlib.sha256(f"{self._begin.round_id}/{self._me}".encode()).digest()[:8]
        return self._setup.codec.for_mean(len(contributors), int.from_bytes(seed, "little") >> 1)

    def _encode_mean(
        self, contributors: tuple[int, ...], mean: torch.Tensor
    ) -> tuple[list[memoryview], SliceMean]:
        codec = self._mean_codec(contributors)
        pieces = encode_span(codec, mean)
        decode_span(codec, pieces, mean)  # the owner, too, applies what travels
        return pieces, SliceMean(mean, contributors, _mean_digest(contributors, pieces))

    async def _contribute(self, owner: int) -> SliceMean | None:
        peer_id = self._begin.members[owner]
        try:
            async with asyncio.timeout_at(self._until_s):
                return await self._contribute_to(owner, peer_id)
        except (LinkLost, BadMessage, TimeoutError):
            if owner not in self._serving:
                self._lose(owner)
            return None

    async def _contribute_to(self, owner: int, peer_id: str) -> SliceMean | None:
        try:
            channel = await self._setup.open(peer_id)
        except LinkLost:
            self._setup.on_unreachable(peer_id)
            raise
        self._channels.append(channel)
        try:
            has_values = self._begin.weights[self._me] > 0
            await channel.send(Contribution(round_id=self._begin.round_id, has_values=has_values))
            if has_values:
                await self._send_change(channel, self._spans[owner])
            return await self._receive_mean(channel, self._spans[owner])
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

    async def _receive_mean(self, channel: Channel, span: Span) -> SliceMean | None:
        header = await channel.receive(Mean, self._begin.exchange_s)
        if not header.contributors:
            return None
        group = range(len(self._spans))
        if not set(header.contributors) <= set(group):
            raise BadMessage("a mean over members that are not in the group")
        if len(set(header.contributors)) != len(header.contributors):
            raise BadMessage("a mean that counts a member twice")
        pieces = []
        codec = self._mean_codec(header.contributors)
        for piece in piece_spans(span):
            data = bytearray(codec.encoded_bytes(piece.elements))
            await channel.receive_into(memoryview(data))
            pieces.append(memoryview(data))
        held: SliceMean | None = await self._setup.offload(self._decode_mean, header, pieces, span)
        if held is None:
            self._wrong_means[channel.remote] = "its mean is not what it announced, or too large"
        return held

    def _decode_mean(self, header: Mean, pieces: list[memoryview], span: Span) -> SliceMean | None:
        if _mean_digest(header.contributors, pieces) != header.digest:
            return None
        values = torch.empty(span.elements)
        try:
            decode_span(self._mean_codec(header.contributors), pieces, values)
        except BadMessage:
            return None
        if not all_finite(values) or self._mean_too_large(values, span):
            return None
        return SliceMean(values, header.contributors, header.digest)

    def _mean_too_large(self, mean: torch.Tensor, span: Span) -> bool:
        weights, own = self._begin.weights, self._setup.snapshot.contribution(span)
        return self._setup.guard.mean_too_large(mean, own, weights[self._me], weights)


def _mean_digest(contributors: tuple[int, ...], pieces: list[memoryview]) -> str:
    digest = hashlib.sha256(repr(contributors).encode())
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()[:32]
