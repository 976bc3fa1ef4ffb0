"""One member's part in the audits of an exchange: it shows its own means, and checks the others'.

On each lane both members are committed to what they contribute to their own slices before they see
what the other contributes; and when all means have come, each draws a chunk to be shown.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence

import torch

from atomtrain.errors import BadMessage
from atomtrain.swarm.codecs.codec import byte_view
from atomtrain.swarm.rounds.audits import Challenge, Claim, challenge, signature_bytes
from atomtrain.swarm.rounds.bases import Bases
from atomtrain.swarm.rounds.commitments import (
    Commitment,
    Own,
    chunk_spans,
    group_digest,
    mean_text,
    sealed_text,
)
from atomtrain.swarm.rounds.exchange_setup import ExchangeSetup
from atomtrain.swarm.rounds.lanes import Lane, Lanes
from atomtrain.swarm.rounds.owning import OwnedSlice, SliceMean, mean_codec
from atomtrain.swarm.rounds.proofs import Proven
from atomtrain.swarm.transport.messages import (
    Audit,
    Begin,
    Contribution,
    Evidence,
    Mean,
    Proof,
    Seal,
)
from atomtrain.swarm.transport.transport import Channel


class Auditor:
    """Commits this member to its own contributions, shows its means, checks the others'."""

    def __init__(
        self,
        setup: ExchangeSetup,
        begin: Begin,
        lanes: Lanes,
        owned: Mapping[int, OwnedSlice],
        own: Callable[[int], Awaitable[Own | None]],
        bases: Bases | None = None,
    ) -> None:
        """Have everything before it; `own` returns this member's contribution to its own slice."""
        self._setup, self._begin, self._lanes, self._owned = setup, begin, lanes, owned
        self._me = begin.members.index(setup.peer_id)
        self._own, self._bases = own, bases
        self._group = group_digest(begin)
        self._theirs: dict[int, str] = {}
        self._sealed: dict[int, str] = {}
        """By slice of another member: what this one is committed to."""
        self._heard = {lane: asyncio.Event() for lane in lanes.all}
        self._to_come = Counter(lane.member for lane in lanes.all)
        self.lied: dict[str, str] = {}
        """Peers whose mean was shown to be wrong, and why."""
        self.proofs: list[Proven] = []
        """What shows that to those who were not there."""

    @property
    def unproven(self) -> tuple[int, ...]:
        """Members that an audit has found wrong, or that have not stood all of theirs."""
        return tuple(member for member, left in self._to_come.items() if left)

    async def header(self, lane: Lane) -> Contribution:
        """Return what opens a lane, or answers that: it binds this member to its own."""
        own = [await self._own(index) for index in self._lanes.slices_of(self._me, lane)]
        return Contribution(
            round_id=self._begin.round_id,
            lane=lane.stream,
            group=self._group,
            commitments=tuple("" if one is None else one.commitment.text for one in own),
        )

    def seal(self, index: int, commitment: Commitment) -> Seal:
        """Return what goes with this member's contribution to another one's slice."""
        self._sealed[index] = commitment.text
        text = sealed_text(self._group, index, commitment.text)
        return Seal(commitment=commitment.text, signature=self._setup.sign(text).hex())

    def bound(self, peer_id: str, index: int, mean: Mean) -> bool:
        """Say whether the owner of a slice has signed its mean."""
        text = mean_text(self._group, index, mean)
        return self._setup.verify(peer_id, text, signature_bytes(mean.signature))

    def as_sealed(self, owner: int, index: int, mean: Mean) -> bool:
        """Say whether a mean has the owner's and this member's contributions as they are sealed.

        Each member looks at its own, and all that hold the same mean were told of the same ones: so
        an owner can tell false ones of nobody who looks.
        """
        known = {owner: self._theirs[index], self._me: self._sealed.get(index, "")}
        told = zip(mean.contributors, mean.commitments, strict=False)
        return all(known.get(member, text) == text for member, text in told)

    def claim(self, owner: int, index: int, mean: Mean, values: torch.Tensor) -> Claim:
        """Return another member's mean of a slice as it is to be judged."""
        return Claim(
            begin=self._begin,
            owner=owner,
            slice_index=index,
            owner_commitment=self._theirs[index],
            mean=mean,
            values=values,
            codec=mean_codec(self._setup.codec, self._begin, index, len(mean.contributors)),
            guard=self._setup.guard,
        )

    def hear(self, lane: Lane, header: Contribution) -> None:
        """Keep what the other member of a lane is committed to; only the first word counts.

        Raises:
            BadMessage: it is not one commitment for each of its slices, or the leader has told the
                two of different groups, so that they would not agree on any mean.
        """
        if lane not in self._heard or self._heard[lane].is_set():
            return
        if header.group != self._group:
            raise BadMessage("the leader has told the other member of another group")
        theirs = self._lanes.slices_of(lane.member, lane)
        if len(header.commitments) != len(theirs):
            raise BadMessage(f"{len(header.commitments)} commitments for {len(theirs)} slices")
        self._theirs |= dict(zip(theirs, header.commitments, strict=True))
        self._heard[lane].set()

    async def heard(self, lane: Lane) -> None:
        """Wait until the other member of a lane is committed."""
        await self._heard[lane].wait()

    async def audit(self, channel: Channel, lane: Lane, means: Sequence[SliceMean | None]) -> None:
        """Have the other member show a chunk of one of its means; show it one of this member's.

        Raises:
            BadMessage: its mean is wrong, or it shows something else.
            LinkLost: it is gone.
        """
        theirs = self._lanes.slices_of(lane.member, lane)
        found = [(j, mean) for j in theirs if (mean := means[j]) is not None]
        bound = [(j, mean) for j, mean in found if mean.pieces]
        doubted = [(j, mean) for j, mean in bound if mean.doubt]
        held = [(j, mean.values.numel()) for j, mean in doubted or bound or found]
        drawn = challenge(held)
        wanted = [] if drawn is None else [drawn]
        slices, chunks = (tuple(one[i] for one in wanted) for i in (0, 1))
        await channel.send(Audit(slices=slices, chunks=chunks))
        asked = await channel.receive(Audit, self._begin.exchange_s)
        showing = asyncio.create_task(self._show(channel, lane, asked))
        try:
            if drawn is not None:
                await self._check(channel, lane, drawn, means)
            await showing
        finally:
            showing.cancel()
        self._to_come[lane.member] -= 1

    def convict(self, channel: Channel, why: str) -> BadMessage:
        """Note what no honest owner does; return it as an error."""
        self.lied[channel.remote] = why
        return BadMessage(f"peer {channel.remote[-8:]}: {why}")

    def believe(self, owner: str, why: str, proven: Proven) -> None:
        """Note what another member has proved of an owner."""
        self.lied[owner] = why
        self.proofs.append(proven)

    def proof_of(self, owner: str) -> Proven:
        """Return what shows others that an owner has lied.

        Raises:
            BadMessage: there is nothing: only who was there could see it.
        """
        for proven in self.proofs:
            each = self._lanes.slices_each
            if self._begin.members[proven.proof.slice_index // each] == owner:
                return proven
        raise BadMessage(f"there is no proof of what {owner[-8:]} did")

    async def _show(self, channel: Channel, lane: Lane, asked: Audit) -> None:
        if len(asked.slices) > 1 or len(asked.slices) != len(asked.chunks):
            raise BadMessage(f"an audit of {len(asked.slices)} slices at once")
        for index, chunk in zip(asked.slices, asked.chunks, strict=True):
            if index not in self._lanes.slices_of(self._me, lane):
                raise BadMessage(f"an audit of slice {index}, which is not on this lane")
            shown = await self._owned[index].show(chunk, await self._own(index))
            await channel.send(shown.evidence)
            for data in shown.chunks:
                await channel.send_bytes(data)

    async def _check(
        self, channel: Channel, lane: Lane, drawn: Challenge, means: Sequence[SliceMean | None]
    ) -> None:
        index, chunk = drawn
        mean = means[index]
        assert mean is not None, "only means that are there are audited"
        assert mean.header is not None, "another member has sent it"
        evidence = await channel.receive(Evidence, self._begin.exchange_s)
        span = chunk_spans(mean.values.numel())[chunk]
        chunks = [torch.empty(span.elements) for _ in mean.contributors]
        for each in chunks:
            await channel.receive_into(byte_view(each))
        claim = self.claim(lane.member, index, mean.header, mean.values)
        offload = self._setup.offload
        flaw = await offload(claim.unproved, chunk, evidence, chunks, self._setup.verify)
        if not flaw and (flaw := await offload(claim.wrong, chunk, chunks)) and mean.pieces:
            proof = Proof(
                begin=self._begin, fragment=self._setup.snapshot.fragment, slice_index=index,
                base_digest="" if self._bases is None else self._bases.digests[index],
                mean=mean.header, chunk=chunk, evidence=evidence,
            )  # fmt: skip
            data = [bytes(piece) for piece in (*mean.pieces, *map(byte_view, chunks))]
            self.proofs.append(Proven(proof, b"".join(data)))
        if flaw:
            raise self.convict(channel, flaw)
