"""Retaking: a proven liar's slices are averaged again, by each member from the others themselves.

    asker  -> member   AskAgain, the liar
    member -> asker    the same; by slice its contribution, as it went to the liar, and its seal

Whoever has caught an owner lying asks all that contribute, and takes the mean itself: so nobody has
to be believed a second time. Who has the same contributions makes the same bytes, and the leader
commits a slice only where all hold the same, so whoever sends others different ones, or nothing,
can but have the slice stay as it was. A member answers when its own exchange is over, each other
one once, and only if it has caught that owner as well.

Where a round has bases, that of a liar's slice is its own, and the slice waits for the next round.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch

from atomtrain.errors import BadMessage
from atomtrain.swarm.codecs.codec import byte_view, square_of
from atomtrain.swarm.codecs.slices import Span, piece_spans
from atomtrain.swarm.rounds.commitments import Commitment, Tree
from atomtrain.swarm.rounds.contributing import Contributions
from atomtrain.swarm.rounds.exchange_setup import ExchangeSetup
from atomtrain.swarm.rounds.owning import OwnedSlice, SliceMean, mean_digest
from atomtrain.swarm.transport.messages import AskAgain, Begin, Seal
from atomtrain.swarm.transport.transport import Channel, LinkLost, begun


class _RetakenSlice(OwnedSlice):
    """A slice whose mean goes to nobody: it is what it is, in no codec."""

    def _encode(
        self, contributors: tuple[int, ...], mean: torch.Tensor
    ) -> tuple[list[memoryview], SliceMean]:
        digest = mean_digest(contributors, self._commitments, [byte_view(mean)])
        square = square_of(mean)
        return [], SliceMean(mean, contributors, digest, math.inf if square is None else square)


_Owning = Callable[[int, type[OwnedSlice]], OwnedSlice]


class Retaking:
    """One member's part in it; belongs to the event loop that runs."""

    def __init__(
        self,
        setup: ExchangeSetup,
        begin: Begin,
        spans: Sequence[Span],
        contributions: Contributions,
        seal: Callable[[int, Commitment], Seal],
    ) -> None:
        """Have everything before it."""
        self._setup, self._begin, self._spans = setup, begin, spans
        self._contributions, self._seal = contributions, seal
        self._me = begin.members.index(setup.peer_id)
        self._liars: frozenset[int] = frozenset()
        self._over = asyncio.Event()
        self._answered: set[tuple[str, int]] = set()
        self.channels: list[Channel] = []
        """Streams that were used."""

    async def run(
        self, lied: Collection[str], until_s: float, owning: _Owning
    ) -> dict[int, SliceMean]:
        """Return the means of the liars' slices, as far as there are any; answer from now on.

        Args:
            lied: The liars' ids.
            until_s: When the exchange is over.
            owning: Returns a slice as if this member owned it.
        """
        if not self._begin.bases:
            self._liars = frozenset(self._begin.members.index(peer_id) for peer_id in lied)
        self._over.set()
        found: dict[int, SliceMean] = {}
        for liar in sorted(self._liars):
            found |= await self._retake(liar, until_s, owning)
        return found

    async def answer(self, channel: Channel, ask: AskAgain) -> None:
        """Send what this member has contributed to a liar's slices.

        Raises:
            BadMessage: it was sent already, or this member has seen no lie of that owner's.
        """
        asked = channel.remote, ask.owner
        if asked in self._answered:
            raise BadMessage(f"member {ask.owner}'s slices were asked for before")
        self._answered.add(asked)
        await self._over.wait()
        if ask.owner not in self._liars or not self._begin.weights[self._me]:
            raise BadMessage(f"member {ask.owner} is not known to have lied, or nothing to show")
        await channel.send(ask)
        for index in self._slices_of(ask.owner):
            pieces, seal = await self._own(index)
            for piece in pieces:
                await channel.send_bytes(piece)
            await channel.send(seal)

    async def _retake(self, liar: int, until_s: float, owning: _Owning) -> dict[int, SliceMean]:
        slices = {index: owning(index, _RetakenSlice) for index in self._slices_of(liar)}
        for one in slices.values():
            for member in self._liars:
                one.lose(member)
        awaited = {member for one in slices.values() for member in one.reduction.awaited}
        others = sorted(awaited - {self._me})
        await asyncio.gather(*(self._ask(member, liar, slices, until_s) for member in others))
        found = {}
        for index, one in slices.items():
            if self._me in one.reduction.awaited:
                await one.put(self._me, *await self._own(index))
            mean = await one.reduce(self._me, None)
            if mean is not None:
                found[index] = mean
        return found

    async def _ask(
        self, member: int, liar: int, slices: dict[int, OwnedSlice], until_s: float
    ) -> None:
        """Have a member's contributions to a liar's slices; who does not give them is lost."""
        try:
            async with asyncio.timeout_at(until_s):
                channel = await self._setup.open(self._begin.members[member])
                self.channels.append(channel)
                try:
                    await begun(channel, AskAgain(round_id=self._begin.round_id, owner=liar))
                    await channel.receive(AskAgain, self._begin.exchange_s)
                    for one in slices.values():
                        await one.take(channel, member)
                finally:
                    channel.close()
        except (LinkLost, BadMessage, TimeoutError):
            for one in slices.values():
                one.lose(member)

    async def _own(self, index: int) -> tuple[list[memoryview], Seal]:
        """Return this member's contribution to another's slice as it travels, and its seal."""
        encode = partial(self._contributions.encode, again=True)
        pieces = piece_spans(self._spans[index])
        made = [await self._setup.offload(encode, piece, index) for piece in pieces]
        tree = Tree(leaf for one in made for leaf in one.leaves)
        norm = sum(one.sent_square for one in made) ** 0.5
        return [one.data for one in made], self._seal(index, Commitment(tree.root, norm))

    def _slices_of(self, owner: int) -> range:
        each = len(self._spans) // len(self._begin.members)
        return range(owner * each, (owner + 1) * each)
