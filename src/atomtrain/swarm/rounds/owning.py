"""A slice at its owner: contributions come in and are judged, one mean goes out to every member.

A contribution counts only if all of it arrived before the slice was closed, its member has sealed
just that, and the guard lets it through. The mean is taken over exactly those that count. They stay
here until the exchange is over, to be shown to whoever audits the mean.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from msgspec.structs import replace

from atomtrain.errors import BadMessage
from atomtrain.swarm.anchors.anchors import Digest
from atomtrain.swarm.anchors.buffer_pool import BufferPool
from atomtrain.swarm.codecs.codec import (
    Codec,
    byte_view,
    decoded,
    encode_span,
    square_of,
)
from atomtrain.swarm.codecs.slices import Span, piece_spans
from atomtrain.swarm.membership.guards import NORM_ROUNDING, Guard
from atomtrain.swarm.rounds.audits import Sign, Verify, signature_bytes
from atomtrain.swarm.rounds.commitments import (
    Commitment,
    Own,
    Tree,
    chunk_spans,
    group_digest,
    leaves_of,
    mean_text,
    sealed_text,
)
from atomtrain.swarm.transport.messages import Begin, Evidence, Mean, Seal
from atomtrain.swarm.transport.transport import Channel


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
    square: float
    """Sum of the squares of the values."""
    header: Mean | None = None
    """What its owner has signed, where another one is."""
    pieces: tuple[memoryview, ...] = ()
    """As they travelled, of slices that may be audited: their owner is bound to just that."""
    doubt: str = ""
    """What is wrong with it by what its owner has signed alone."""


class _Kept(NamedTuple):
    """A contribution that may have to be shown."""

    pieces: list[memoryview]
    tree: Tree
    seal: Seal


_NO_MEAN = Mean(contributors=(), digest="", shares=(), commitments=(), signature="")


class _Outbound(NamedTuple):
    header: Mean
    pieces: list[memoryview]


class _Shown(NamedTuple):
    """What is sent to whoever audits a mean."""

    evidence: Evidence
    chunks: list[memoryview]
    """Of each contribution, in the order of the contributors, float32."""


def mean_codec(codec: Codec, begin: Begin, slice_index: int, contributors: int) -> Codec:
    """Return how the mean of a slice travels; alike for all members of the round."""
    seed = hashlib.sha256(f"{begin.round_id}/{slice_index}".encode()).digest()[:8]
    return codec.for_mean(contributors, int.from_bytes(seed, "little") >> 1)


def mean_digest(
    contributors: tuple[int, ...],
    commitments: tuple[str, ...],
    pieces: Sequence[memoryview],
    base_digest: str = "",
) -> str:
    """Return the hash of a mean as it travels, of what it is made of, and of what it is added to.

    Members that hold the same one were told of the same commitments, and each knows its own.
    """
    digest = Digest()
    digest.update(repr((contributors, commitments, base_digest)).encode())
    for piece in pieces:
        digest.update(piece)
    return digest.text()


class SliceReduction:
    """Weighted mean of one slice over the members of a group.

    Members are indices in the group. Holds all contributions to the slice until it is closed.
    Thread-safe use is up to the caller: `add` and `close` may run on a worker thread, one call at a
    time.
    """

    def __init__(self, elements: int, weights: Sequence[int], guard: Guard | None = None) -> None:
        """Expect a contribution from each member with a weight above zero."""
        self._elements = elements
        self._weights = tuple(weights)
        self._guard = guard or Guard()
        self._awaited = {member for member, weight in enumerate(weights) if weight > 0}
        self._values: dict[int, torch.Tensor] = {}
        self._norms: dict[int, float] = {}
        self._closed = False
        self.shares: tuple[float, ...] = ()
        """What each contributor counts in the mean, where that is not as its weight says."""
        self.rejected: dict[int, str] = {}
        """Members whose contribution was evidence against them, and why."""

    @property
    def complete(self) -> bool:
        """Nobody is awaited any more."""
        return not self._awaited

    @property
    def awaited(self) -> frozenset[int]:
        """Members whose contribution may still come."""
        return frozenset(self._awaited)

    def add(self, member: int, values: torch.Tensor, norm: float | None = None) -> bool:
        """Take a complete contribution, 1-D float32 of the slice's size; say whether it may count.

        It may not if it is not finite, not awaited (any more), too late, or not of the `norm` that
        its member has told, which it is judged by. A contribution that does not count makes its
        member lost. `values` are the reduction's from now on.
        """
        if self._closed or member not in self._awaited:
            return False
        self._awaited.discard(member)
        if values.shape != (self._elements,):
            return False
        square = square_of(values)
        if square is None:
            self.rejected[member] = "not finite"
            return False
        found = square**0.5
        if norm is not None and abs(found - norm) > NORM_ROUNDING * found:
            self.rejected[member] = "its norm is not what it signed"
            return False
        self._values[member] = values
        self._norms[member] = found if norm is None else norm
        return True

    def lose(self, member: int) -> None:
        """Stop waiting for a member."""
        self._awaited.discard(member)

    def reject(self, member: int, reason: str) -> None:
        """Stop waiting for a member that sent what cannot be honest."""
        self._awaited.discard(member)
        self.rejected.setdefault(member, reason)

    def close(self, out: torch.Tensor | None = None) -> tuple[tuple[int, ...], torch.Tensor | None]:
        """Return who counts, ascending, and their mean; None if nobody does. Closes for good.

        The mean is written to `out` if there is one, else perhaps to a contribution's memory.
        """
        self._closed = True
        self._awaited.clear()
        values, self._values = self._values, {}
        norms, self._norms = self._norms, {}
        # Until nobody is too large among those that are left: receivers see only them.
        while found := self._guard.too_large(norms, self._elements, self._weights):
            for member, reason in found.items():
                del values[member], norms[member]
                self.rejected[member] = reason
        if not values:
            return (), None
        mean, self.shares = self._guard.mean_of(values, self._weights, out)
        return tuple(sorted(values)), mean


class OwnedSlice:
    """Reduces one slice and serves its mean; who is lost or late does not count."""

    def __init__(
        self,
        slice_index: int,
        place: torch.Tensor,
        begin: Begin,
        codec: Codec,
        offload: Offload,
        reduction: SliceReduction,
        memory: BufferPool,
        verify: Verify,
        sign: Sign,
    ) -> None:
        """Own a slice of the round from now on, for half of its time.

        Its mean is written to `place`, 1-D float32 of the slice's size; contributions come to
        `memory`. `verify` says whether a peer has signed something, `sign` does it for this one.
        """
        self.reduction = reduction
        self.base_digest = ""
        """Hash of the slice's base, in rounds that have bases; known before the slice is closed."""
        self.contributors: tuple[int, ...] = ()
        self._commitments: tuple[str, ...] = ()
        """Those of the contributors, in their order."""
        self._index = slice_index
        self._place = place
        self._begin = begin
        self._codec = codec
        self._offload = offload
        self._memory = memory
        self._verify, self._sign = verify, sign
        self._group = group_digest(begin)
        self._kept: dict[int, _Kept] = {}
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

    def forget(self) -> None:
        """Let go of the contributions: nobody will ask to see them."""
        self._kept.clear()

    async def take(self, channel: Channel, member: int) -> None:
        """Take a member's contribution off its stream.

        It is read to its end in any case: its sender must get to the mean, for a slice that one
        member lacks is not committed.

        Raises:
            LinkLost: the member is gone; whoever called has to lose it.
        """
        pieces = []
        for start, stop in piece_spans(Span(0, self._place.numel())):
            data = byte_view(self._memory.empty(self._codec.encoded_bytes(stop - start)))
            await channel.receive_into(data)
            pieces.append(data)
        await self.put(member, pieces, await channel.receive(Seal, self._begin.exchange_s))

    async def put(self, member: int, pieces: list[memoryview], seal: Seal) -> None:
        """Take a member's contribution as it travels."""
        if member in self.reduction.awaited:
            async with self._adding:
                await self._offload(self._add, member, pieces, seal)
        self._changed.set()

    async def answer(self, channel: Channel) -> None:
        """Send the mean as soon as there is one.

        Raises:
            LinkLost: the member is gone.
            TimeoutError: the round's time is over.
        """
        async with asyncio.timeout_at(self._until_s):
            out = await asyncio.shield(self._mean)
        await channel.send(out.header)
        for piece in out.pieces:
            await channel.send_bytes(piece)

    async def reduce(self, me: int, own: Own | None) -> SliceMean | None:
        """Wait for the contributions; return the mean as it travels, None if there is none.

        `own` is this member's contribution to the slice, if it has a weight.
        """
        try:
            async with asyncio.timeout_at(self._collect_until_s):
                while not self.reduction.awaited <= {me}:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass  # who has not delivered by now does not count
        async with self._adding:
            out: _Outbound
            held: SliceMean | None
            out, held = await self._offload(self._close, me, own)
        self._mean.set_result(out)
        return held

    async def show(self, chunk: int, own: Own | None) -> _Shown:
        """Return the evidence for a chunk of the mean; `own` is this member's contribution.

        Raises:
            BadMessage: there is no such chunk, or no mean.
        """
        spans = chunk_spans(self._place.numel())
        if chunk >= len(spans) or not self.contributors:
            raise BadMessage(f"slice {self._index} has no chunk {chunk} of a mean")
        shown: _Shown = await self._offload(self._show, chunk, spans[chunk], own)
        return shown

    def _show(self, chunk: int, span: Span, own: Own | None) -> _Shown:
        signatures, paths, chunks = [], [], []
        for member in self.contributors:
            kept = self._kept.get(member)
            if kept is not None:
                values, tree = self._decoded(kept.pieces), kept.tree
            else:
                assert own is not None, "only this member's own contribution has no seal"
                values, tree, _ = own
            signatures.append("" if kept is None else kept.seal.signature)
            paths.append(tree.path(chunk))
            chunks.append(byte_view(values[span.start : span.stop].contiguous()))
        return _Shown(Evidence(signatures=tuple(signatures), paths=tuple(paths)), chunks)

    def _decoded(self, pieces: list[memoryview]) -> torch.Tensor:
        return decoded(self._codec, pieces, self._place.numel())

    def _add(self, member: int, pieces: list[memoryview], seal: Seal) -> None:
        try:
            values = self._decoded(pieces)
        except BadMessage as error:
            self.reduction.reject(member, str(error))
            return
        tree = Tree(leaves_of(values, self._place.numel()))
        text = sealed_text(self._group, self._index, seal.commitment)
        signed = self._verify(self._begin.members[member], text, signature_bytes(seal.signature))
        commitment = Commitment.read(seal.commitment)
        if not signed or commitment is None or tree.root != commitment.root:
            self.reduction.reject(member, "its contribution is not what it signed")
            return
        self._kept[member] = _Kept(pieces, tree, seal)
        self.reduction.add(member, values, commitment.norm)

    def _close(self, me: int, own: Own | None) -> tuple[_Outbound, SliceMean | None]:
        if me in self.reduction.awaited and own is not None:
            self.reduction.add(me, own.values, own.commitment.norm)
        contributors, mean = self.reduction.close(self._place)
        self.contributors = contributors
        if mean is None:
            return _Outbound(_NO_MEAN, []), None
        told = {member: kept.seal.commitment for member, kept in self._kept.items()}
        told |= {me: own.commitment.text} if own is not None else {}
        self._commitments = tuple(told[member] for member in contributors)
        pieces, held = self._encode(contributors, mean)
        header = Mean(
            contributors=contributors,
            digest=held.digest,
            shares=self.reduction.shares,
            commitments=self._commitments,
            signature="",
        )
        signature = self._sign(mean_text(self._group, self._index, header)).hex()
        out = _Outbound(replace(header, signature=signature), pieces)
        return out, held if math.isfinite(held.square) else None

    def _encode(
        self, contributors: tuple[int, ...], mean: torch.Tensor
    ) -> tuple[list[memoryview], SliceMean]:
        codec = mean_codec(self._codec, self._begin, self._index, len(contributors))
        # The owner, too, applies what travels.
        pieces = encode_span(codec, mean, sent=None if codec.exact else mean)
        digest = mean_digest(contributors, self._commitments, pieces, self.base_digest)
        square = square_of(mean)
        square = math.inf if square is None else square
        return pieces, SliceMean(mean, contributors, digest, square)
