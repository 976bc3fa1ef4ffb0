"""Retaking: a proven liar's slices are averaged again, by each member from the others themselves.

    asker  -> member   AskAgain, the liar
    member -> asker    Heard, whether it has yet to be shown the lie
    asker  -> member   in that case Proof, then its bytes
    member -> asker    AskAgain; by slice its contribution, as it went to the liar, and its seal

Whoever has caught an owner lying asks all others, and takes the mean itself: so nobody has to be
believed a second time. Who has the same contributions makes the same bytes, and the leader commits
a slice only where all hold the same, so whoever sends others different ones, or nothing, can but
have the slice stay as it was. A member answers when its own exchange is over, each other one once.
Who had seen no lie judges the proof, takes back what it has told the leader that it holds, and
takes the slices again as well.

Where a round has bases, that of a liar's slice stays what the liar has sent, if it was believed:
what it is cancels out, and who holds another one holds another mean.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from atomtrain.errors import BadMessage
from atomtrain.swarm.codecs.codec import byte_view, square_of
from atomtrain.swarm.codecs.slices import Span, piece_spans
from atomtrain.swarm.rounds.auditor import Auditor
from atomtrain.swarm.rounds.bases import Bases
from atomtrain.swarm.rounds.commitments import Commitment, Tree
from atomtrain.swarm.rounds.contributing import Contributions
from atomtrain.swarm.rounds.exchange_setup import ExchangeSetup
from atomtrain.swarm.rounds.owning import OwnedSlice, SliceMean, mean_digest
from atomtrain.swarm.rounds.proofs import Proven, Rulebook, judge_proof, proof_bytes
from atomtrain.swarm.transport.messages import AskAgain, Begin, Change, Heard, Proof, Seal
from atomtrain.swarm.transport.transport import Channel, LinkLost, begun


class _RetakenSlice(OwnedSlice):
    """A slice whose mean goes to nobody: it is what it is, in no codec."""

    def _encode(
        self, contributors: tuple[int, ...], mean: torch.Tensor
    ) -> tuple[list[memoryview], SliceMean]:
        made_of = contributors, self._commitments
        digest = mean_digest(*made_of, [byte_view(mean)], self.base_digest)
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
        auditor: Auditor,
        bases: Bases | None,
    ) -> None:
        """Have everything before it; `auditor` knows who has lied."""
        self._setup, self._begin, self._spans = setup, begin, spans
        self._contributions, self._auditor, self._bases = contributions, auditor, bases
        self._me = begin.members.index(setup.peer_id)
        fragment = setup.snapshot.fragment  # of others nothing is judged here
        elements = (0,) * fragment + (spans[-1].stop,)
        self._rules = Rulebook(elements, setup.codec, setup.guard)
        self._liars: frozenset[int] = frozenset()
        self._over, self._more_liars = asyncio.Event(), asyncio.Event()
        self._asked: set[tuple[str, int]] = set()
        self._judging = asyncio.Lock()
        self.shown = asyncio.Event()
        """Another member has proved a lie since slices were last taken again."""
        self.channels: list[Channel] = []
        """Streams that were used."""

    async def run(self, until_s: float, owning: _Owning) -> dict[int, SliceMean | None]:
        """Return the means of new liars' slices, None where there is none; answer from now on.

        Args:
            until_s: When the exchange is over.
            owning: Returns a slice as if this member owned it.
        """
        lied = {self._begin.members.index(peer_id) for peer_id in self._auditor.lied}
        new, self._liars = sorted(lied - self._liars), frozenset(lied)
        self._over.set()
        self._more_liars.set()
        self.shown.clear()
        found: dict[int, SliceMean | None] = {}
        for liar in new:
            found |= await self._retake(liar, until_s, owning)
        return found

    async def answer(self, channel: Channel, ask: AskAgain) -> None:
        """Send what this member has contributed to a liar's slices.

        Raises:
            BadMessage: there is no such member, it was sent already, or it is not proved that the
                owner has lied.
        """
        asked = channel.remote, ask.owner
        if ask.owner >= len(self._begin.members):
            raise BadMessage(f"there is no member {ask.owner}")
        if asked in self._asked:
            raise BadMessage(f"member {ask.owner}'s slices were asked for before")
        self._asked.add(asked)
        await self._over.wait()
        unseen = self._begin.members[ask.owner] not in self._auditor.lied
        await channel.send(Heard(wanted=unseen))
        if unseen:
            await self._hear(channel, ask.owner)
        # Not before the leader knows that this member takes slices again.
        while ask.owner not in self._liars:
            self._more_liars.clear()
            await self._more_liars.wait()
        await channel.send(ask)
        for index in self._slices_of(ask.owner) if self._begin.weights[self._me] else ():
            if self._bases is not None:
                believed = self._bases.believed(index)
                await channel.send(Change(follows=believed))
                if not believed:
                    continue
            pieces, seal = await self._own(index)
            for piece in pieces:
                await channel.send_bytes(piece)
            await channel.send(seal)

    async def _hear(self, channel: Channel, owner: int) -> None:
        """Have a lie proved.

        Raises:
            BadMessage: it is not.
        """
        proof = await channel.receive(Proof, self._begin.exchange_s)
        if (proof.begin, proof.fragment) != (self._begin, self._setup.snapshot.fragment):
            raise BadMessage("it proves something of another round")
        data = bytearray(proof_bytes(proof, self._rules))
        await channel.receive_into(memoryview(data))
        accused = self._begin.members[owner]
        async with self._judging:
            if accused not in self._auditor.lied:
                proven = Proven(proof, bytes(data))
                judging = judge_proof, proven, self._rules, self._setup.verify
                judged = await self._setup.offload(*judging)
                if not judged.flaw or judged.owner != accused:
                    raise BadMessage(f"it accuses {accused[-8:]}, and proves nothing")
                self._auditor.believe(accused, judged.flaw, proven)
                self.shown.set()

    async def _retake(
        self, liar: int, until_s: float, owning: _Owning
    ) -> dict[int, SliceMean | None]:
        slices = {index: owning(index, _RetakenSlice) for index in self._slices_of(liar)}
        for index, one in slices.items():
            one.base_digest = "" if self._bases is None else self._bases.digests[index]
            for member in self._liars:
                one.lose(member)
        others = {*range(len(self._begin.members))} - self._liars - {self._me}
        await asyncio.gather(*(self._ask(m, liar, slices, until_s) for m in sorted(others)))
        found: dict[int, SliceMean | None] = dict.fromkeys(slices)
        for index, one in slices.items():
            if self._bases is not None and not self._bases.believed(index):
                continue
            if self._me in one.reduction.awaited:
                await one.put(self._me, *await self._own(index))
            found[index] = await one.reduce(self._me, None)
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
                    await self._ask_over(channel, member, liar, slices)
                finally:
                    channel.close()
        except (LinkLost, BadMessage, TimeoutError):
            for one in slices.values():
                one.lose(member)

    async def _ask_over(
        self, channel: Channel, member: int, liar: int, slices: dict[int, OwnedSlice]
    ) -> None:
        within_s = self._begin.exchange_s
        await begun(channel, AskAgain(round_id=self._begin.round_id, owner=liar))
        if (await channel.receive(Heard, within_s)).wanted:
            proven = self._auditor.proof_of(self._begin.members[liar])
            await channel.send(proven.proof)
            await channel.send_bytes(proven.data)
        await channel.receive(AskAgain, within_s)
        for one in slices.values() if self._begin.weights[member] else ():
            if self._bases is None or (await channel.receive(Change, within_s)).follows:
                await one.take(channel, member)
            else:
                one.lose(member)

    async def _own(self, index: int) -> tuple[list[memoryview], Seal]:
        """Return this member's contribution to another's slice as it travels, and its seal."""
        encode = partial(self._contributions.encode, again=True)
        pieces = piece_spans(self._spans[index])
        made = [await self._setup.offload(encode, piece, index) for piece in pieces]
        tree = Tree(leaf for one in made for leaf in one.leaves)
        norm = sum(one.sent_square for one in made) ** 0.5
        return [one.data for one in made], self._auditor.seal(index, Commitment(tree.root, norm))

    def _slices_of(self, owner: int) -> range:
        each = len(self._spans) // len(self._begin.members)
        return range(owner * each, (owner + 1) * each)
