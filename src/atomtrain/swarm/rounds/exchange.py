"""The butterfly of one round: every member's slice j goes to its owner, a mean comes back.

A member owns several slices of a large fragment. Two members have a few streams with each other
(*lanes*), half of them opened by each. A lane has some of the slices of both, and carries the same
in both directions: first the sender's contributions to the receiver's slices, then the means of
the sender's own. So a slow link has something to carry from the first byte to the last: while means
wait for the slowest contribution there are others to send, and means go over streams whose windows
are open by then. Last, each audits one of the other's means on the lane. What happens to a slice at
its owner is in `owning`; what an audit shows, in `audits`; what becomes of a liar's slices, in
`retaking`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import torch

from atomtrain.errors import BadMessage
from atomtrain.swarm.anchors.buffer_pool import exchange_memory, pooled_empty
from atomtrain.swarm.codecs.codec import Codec, byte_view, decode_span, square_of
from atomtrain.swarm.codecs.slices import (
    Span,
    piece_spans,
    slice_spans,
    slices_per_member,
)
from atomtrain.swarm.membership.guards import JUDGED_ELEMENTS, weights_flaw
from atomtrain.swarm.rounds.auditor import Auditor
from atomtrain.swarm.rounds.bases import Bases
from atomtrain.swarm.rounds.commitments import Commitment, Tree
from atomtrain.swarm.rounds.contributing import Contributions
from atomtrain.swarm.rounds.exchange_setup import ExchangeResult, ExchangeSetup
from atomtrain.swarm.rounds.lanes import Lane, Lanes
from atomtrain.swarm.rounds.owning import (
    OwnedSlice,
    SliceMean,
    SliceReduction,
    mean_codec,
    mean_digest,
)
from atomtrain.swarm.rounds.retaking import Retaking
from atomtrain.swarm.transport.messages import AskAgain, Begin, Change, Contribution, Mean
from atomtrain.swarm.transport.transport import Channel, LinkLost, begun


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
        self._lanes = Lanes(self._me, len(members), self._each)
        self._spans = slice_spans(elements, len(members) * self._each)
        self._memory = exchange_memory((elements, len(members), setup.codec.name))
        self._bases = None
        if begin.bases:
            self._bases = Bases(
                setup.snapshot, setup.update, setup.codec, self._spans, setup.offload, self._memory
            )
        self._means: list[SliceMean | None] = [None] * len(self._spans)
        self._values = pooled_empty(elements)  # what all means lie in
        self._own_square = [0.0] * len(self._spans)
        self._wrong_means: dict[str, str] = {}
        self._channels: list[Channel] = []
        first = self._me * self._each
        self._owned = {j: self._own(j) for j in range(first, first + self._each)}
        self._contributions = Contributions(setup, begin, self._spans, self._bases, self._memory)
        own = self._contributions.own
        self._auditor = Auditor(setup, begin, self._lanes, self._owned, own, self._bases)
        self._until_s = asyncio.get_running_loop().time() + begin.exchange_s
        self._retaking = Retaking(
            setup, begin, self._spans, self._contributions, self._auditor, self._bases
        )
        self._counted: dict[str, bool] = {}

    def _own(self, index: int, kind: type[OwnedSlice] = OwnedSlice) -> OwnedSlice:
        setup, begin, span = self._setup, self._begin, self._spans[index]
        reduction = SliceReduction(span.elements, begin.weights, setup.guard)
        # Whoever takes a liar's slice again must make the bytes that all others make.
        excluded = setup.excluded if kind is OwnedSlice else ()
        for member, peer_id in enumerate(begin.members):
            if peer_id in excluded:
                reduction.lose(member)
        place, codec = self._place(index), setup.codec
        return kind(
            index, place, begin, codec, setup.offload, reduction, self._memory, setup.verify,
            setup.sign,
        )  # fmt: skip

    def _place(self, index: int) -> torch.Tensor:
        start, stop = self._spans[index]
        return self._values[start:stop]

    async def run(self) -> ExchangeResult:
        """Return what is held when all slices are, or at the exchange's deadline."""
        owned = self._owned
        try:
            await together(
                *(self._reduce(j) for j in owned),
                *(self._exchange(lane) for lane in self._lanes.all),
            )
        finally:
            for one in owned.values():
                one.forget()
            self._contributions.forget()
        for member in self._auditor.unproven:
            for index in range(member * self._each, (member + 1) * self._each):
                self._means[index] = None
        self._counted = self._who_counted()
        return await self.again()

    @property
    def shown(self) -> asyncio.Event:
        """Set while `again` would take slices of whom another member has proved to lie."""
        return self._retaking.shown

    async def again(self) -> ExchangeResult:
        """Return what is held when slices of liars have been taken again.

        Not while a decision about what was returned before may come: its means lie where these do.
        """
        retaken = await self._retaking.run(self._until_s, self._own)
        for index, mean in retaken.items():
            self._means[index] = mean
        channels = [*self._channels, *self._retaking.channels]
        members, slices = self._begin.members, self._owned.values()
        rejected = {members[i]: w for one in slices for i, w in one.reduction.rejected.items()}
        rejected |= self._wrong_means | self._auditor.lied
        everywhere = set.intersection(*(set(one.contributors) for one in slices))
        accepted = tuple(members[i] for i in sorted(everywhere))
        held = (self._means, channels, self._values)
        lied, proofs = self._auditor.lied, self._auditor.proofs
        return ExchangeResult(*held, rejected, lied, accepted, self._counted, self._bases, proofs)

    def _who_counted(self) -> dict[str, bool]:
        """Say of each other owner whose means are all here if they have this contribution."""
        counted = {}
        for member, peer_id in enumerate(self._begin.members):
            means = self._means[member * self._each : (member + 1) * self._each]
            came = [self._me in mean.contributors for mean in means if mean is not None]
            if len(came) == self._each and member != self._me and self._begin.weights[self._me]:
                counted[peer_id] = all(came)
        return counted

    async def serve(self, channel: Channel, header: Contribution | AskAgain) -> None:
        """Take a lane that another member has opened; return when nothing goes over it any more.

        Or answer a member that takes a liar's slices again.

        Raises:
            BadMessage: it is not in the group, or this is none of its lanes.
            TimeoutError: the exchange is over.
        """
        members, peer_id = self._begin.members, channel.remote
        if peer_id not in members or peer_id == self._setup.peer_id:
            raise BadMessage(f"peer {peer_id[-8:]} is not in this round")
        if isinstance(header, AskAgain):
            async with asyncio.timeout_at(self._until_s):
                await self._retaking.answer(channel, header)
            return
        member = members.index(peer_id)
        lane = Lane(member, header.lane, mine=False)
        self._auditor.hear(lane, header)
        async with asyncio.timeout_at(self._until_s):
            await self._lanes.arrived(channel, member, header.lane)

    async def _reduce(self, index: int) -> None:
        owned = self._owned[index]
        if self._bases is not None:
            await self._bases.own(index)
            owned.base_digest = self._bases.digests[index]
        self._means[index] = await owned.reduce(self._me, await self._contributions.own(index))

    async def _exchange(self, lane: Lane) -> None:
        """Send and receive what a lane carries; who is lost on it does not count any more."""
        try:
            async with asyncio.timeout_at(self._until_s):
                opened = self._opened(lane) if lane.mine else self._lanes.arrival(lane)
                await self._exchange_over(await opened, lane)
        except (LinkLost, BadMessage, TimeoutError):
            self._lose(lane)
        finally:
            self._lanes.end(lane)

    def _lose(self, lane: Lane) -> None:
        """Go on without the member at the other end of a lane.

        Of what it contributes to this member's slices, those that had come whole count, and no
        other is waited for. Of its own slices on the lane this member gets no mean: it says so, and
        the leader commits none of them.
        """
        for index in self._lanes.slices_of(self._me, lane):
            self._owned[index].lose(lane.member)
        if lane.mine:
            self._lanes.give_up(lane.member)

    async def _opened(self, lane: Lane) -> Channel:
        peer_id = self._begin.members[lane.member]
        try:
            channel = await self._setup.open(peer_id)
        except LinkLost:
            self._setup.on_unreachable(peer_id)
            raise
        return await begun(channel, await self._auditor.header(lane))

    async def _exchange_over(self, channel: Channel, lane: Lane) -> None:
        self._channels.append(channel)
        try:
            await together(self._send(channel, lane), self._receive(channel, lane))
            await self._auditor.audit(channel, lane, self._means)
        except BaseException:
            channel.close()
            raise
        if lane.mine:  # the other end has all of it: it waits until the lane is closed here
            channel.close()

    async def _send(self, channel: Channel, lane: Lane) -> None:
        if not lane.mine:
            await channel.send(await self._auditor.header(lane))
        own = self._lanes.slices_of(self._me, lane)
        if self._bases is not None:
            for index in own:
                for piece in await self._bases.own(index):
                    await channel.send_bytes(piece)
        if self._begin.weights[self._me] > 0:
            # Not before: whoever owns a slice is committed to its own contribution first.
            await self._auditor.heard(lane)
            await self._send_changes(channel, self._lanes.slices_of(lane.member, lane))
        for index in own:
            await self._owned[index].answer(channel)

    async def _receive(self, channel: Channel, lane: Lane) -> None:
        if lane.mine:  # it may begin the round later than this member
            header = await channel.receive(Contribution, self._begin.exchange_s)
            self._auditor.hear(lane, header)
        theirs = self._lanes.slices_of(lane.member, lane)
        if self._bases is not None:
            for index in theirs:
                await self._bases.receive(channel, index, self._setup.guard, self._setup.usual_rms)
            if channel.remote in self._bases.strange:
                self._wrong_means[channel.remote] = "its anchor is far from this peer's"
        if self._begin.weights[lane.member] > 0:
            for index in self._lanes.slices_of(self._me, lane):
                await self._take(channel, lane.member, self._owned[index])
        # Which slice is audited is drawn now, and told only when all means are here.
        full = [index for index in theirs if self._spans[index].elements]
        audited = secrets.choice(full) if full else None
        for index in theirs:
            mean = await self._receive_mean(channel, index)
            if mean is not None and index != audited and not mean.doubt:
                mean = replace(mean, pieces=())
            self._means[index] = mean

    async def _take(self, channel: Channel, member: int, owned: OwnedSlice) -> None:
        if self._bases is not None:
            change = await channel.receive(Change, self._begin.exchange_s)
            if not change.follows:
                owned.lose(member)
                return
        await owned.take(channel, member)

    async def _send_changes(self, channel: Channel, slices: range) -> None:
        for index in slices:
            if self._bases is not None:
                believed = await self._bases.known(index)
                await channel.send(Change(follows=believed))
                if not believed:
                    continue
            leaves: list[bytes] = []
            square = 0.0
            for piece in piece_spans(self._spans[index]):
                encoded = await self._setup.offload(self._contributions.encode, piece, index)
                self._own_square[index] += encoded.square
                leaves += encoded.leaves
                square += encoded.sent_square
                await channel.send_bytes(encoded.data)
            commitment = Commitment(Tree(leaves).root, square**0.5)
            await channel.send(self._auditor.seal(index, commitment))

    async def _receive_mean(self, channel: Channel, index: int) -> SliceMean | None:
        header = await channel.receive(Mean, self._begin.exchange_s)
        if not header.contributors:
            return None
        counted, weights = header.contributors, self._begin.weights
        if not set(counted) <= {member for member, weight in enumerate(weights) if weight > 0}:
            raise self._auditor.convict(channel, "its mean is over members that cannot count")
        if len(set(counted)) != len(counted):
            raise self._auditor.convict(channel, "its mean counts a member twice")
        if not self._auditor.bound(channel.remote, index, header):
            raise self._auditor.convict(channel, "it has not signed its mean")
        if not self._auditor.as_sealed(index // self._each, index, header):
            raise self._auditor.convict(channel, "its mean is of other contributions than sealed")
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
        if self._bases is not None and not await self._bases.known(index):
            return None
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
        counted, told = header.contributors, header.commitments
        if mean_digest(counted, told, pieces, base_digest) != header.digest:
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
        doubt = self._auditor.claim(index // self._each, index, header, values).impossible()
        return SliceMean(values, counted, header.digest, square, header, tuple(pieces), doubt)

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
    leader = members.index(setup.leader) if setup.leader in members else None
    claimed = setup.snapshot.weight
    if flaw := weights_flaw(begin.weights, place, claimed, leader, setup.counted):
        raise BadMessage(f"the leader {flaw}")
    return place


async def together(*work: Coroutine[Any, Any, None]) -> None:
    """Do several things at the same time; the first that fails ends all, and this waits for it."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
