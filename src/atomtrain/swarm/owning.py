"""A slice at its owner: contributions come in, one mean goes out to every member."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from atomtrain.swarm.codec import Codec, all_finite, decode_span, encode_span
from atomtrain.swarm.messages import BadMessage, Begin, Contribution, Mean
from atomtrain.swarm.reduction import SliceReduction
from atomtrain.swarm.slices import Span, piece_spans
from atomtrain.swarm.transport import Channel


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


class _Outbound(NamedTuple):
    header: Mean
    pieces: list[memoryview]


def mean_codec(codec: Codec, begin: Begin, slice_index: int, contributors: int) -> Codec:
    """Return how the mean of a slice travels; alike for all members of the round."""
    seed = hashlib.sha256(f"{begin.round_id}/{slice_index}".encode()).digest()[:8]
    return codec.for_mean(contributors, int.from_bytes(seed, "little") >> 1)


def mean_digest(contributors: tuple[int, ...], pieces: list[memoryview]) -> str:
    """Return the hash of a mean as it travels."""
    digest = hashlib.sha256(repr(contributors).encode())
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()[:32]


class OwnedSlice:
    """Reduces one slice and serves its mean; who is lost or late does not count."""

    def __init__(
        self,
        slice_index: int,
        span: Span,
        begin: Begin,
        codec: Codec,
        offload: Offload,
        reduction: SliceReduction,
    ) -> None:
        """Own a slice of the round from now on, for half of its time."""
        self.reduction = reduction
        self.contributors: tuple[int, ...] = ()
        self.serving: set[int] = set()
        """Members whose stream has come."""
        self._index = slice_index
        self._span = span
        self._begin = begin
        self._codec = codec
        self._offload = offload
        self._adding = asyncio.Lock()
        self._changed = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._mean: asyncio.Future[_Outbound] = loop.create_future()
        self._collect_until_s = loop.time() + begin.exchange_s / 2
        self._until_s = loop.time() + begin.exchange_s

    def lose(self, member: int) -> None:
        """Stop waiting for a member."""
        self.reduction.lose(member)
        self._changed.set()

    async def serve(self, channel: Channel, member: int, header: Contribution) -> None:
        """Take a member's contribution, and answer with the mean.

        Raises:
            LinkLost: the member is gone; it does not count, and nobody waits for it.
            BadMessage: it comes twice.
        """
        if member in self.serving:
            raise BadMessage("a second contribution of the same member")
        self.serving.add(member)
        try:
            if header.has_values:
                values = await self._receive(channel, member)
                if values is not None:
                    async with self._adding:
                        await self._offload(self.reduction.add, member, values)
        finally:
            self.lose(member)
        async with asyncio.timeout_at(self._until_s):
            out = await asyncio.shield(self._mean)
        await channel.send(out.header)
        for piece in out.pieces:
            await channel.send_bytes(piece)

    async def reduce(self, me: int, own: Callable[[Span], torch.Tensor]) -> SliceMean | None:
        """Wait for the contributions; return the mean as it travels, None if there is none.

        `own` returns this member's contribution; it is called if the member has a weight.
        """
        if self._begin.weights[me]:
            values = await self._offload(own, self._span)
            async with self._adding:
                await self._offload(self.reduction.add, me, values)
        try:
            async with asyncio.timeout_at(self._collect_until_s):
                while not self.reduction.complete:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass  # who has not delivered by now does not count
        async with self._adding:
            contributors, mean = await self._offload(self.reduction.close)
        self.contributors = contributors
        if mean is None:
            self._mean.set_result(_Outbound(Mean(contributors=(), digest=""), []))
            return None
        pieces, held = await self._offload(self._encode, contributors, mean)
        header = Mean(contributors=contributors, digest=held.digest)
        self._mean.set_result(_Outbound(header, pieces))
        return held if all_finite(held.values) else None

    async def _receive(self, channel: Channel, member: int) -> torch.Tensor | None:
        """Return a contribution, or None if it does not count.

        It is read to its end in any case: its sender must get to the mean, for a slice that one
        member lacks is not committed.
        """
        elements = self._span.elements
        values = torch.empty(elements) if member in self.reduction.awaited else None
        for start, stop in piece_spans(Span(0, elements)):
            data = bytearray(self._codec.encoded_bytes(stop - start))
            await channel.receive_into(memoryview(data))
            try:
                if values is not None:
                    await self._offload(self._codec.decode, data, values[start:stop])
            except BadMessage as error:
                self.reduction.reject(member, str(error))
                values = None
        return values

    def _encode(
        self, contributors: tuple[int, ...], mean: torch.Tensor
    ) -> tuple[list[memoryview], SliceMean]:
        codec = mean_codec(self._codec, self._begin, self._index, len(contributors))
        pieces = encode_span(codec, mean)
        decode_span(codec, pieces, mean)  # the owner, too, applies what travels
        return pieces, SliceMean(mean, contributors, mean_digest(contributors, pieces))
