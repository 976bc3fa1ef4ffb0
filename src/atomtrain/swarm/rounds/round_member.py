"""A member's way through one round, from invitation to decision, and what the decision makes.

    Invite --> snapshot at the next boundary --> Ready --> Begin --> exchange --> Held --> Commit

Whatever breaks on the way ends the round for this member only. If its contribution may have been
used although it did not hear the decision, it keeps the snapshot: should the anchor that it fetches
later come from that very round, its progress is measured from there and nothing counts twice.

A decision makes the same bits of an anchor at all members of its group.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from atomtrain.errors import BadMessage
from atomtrain.swarm.anchors.anchors import Anchor, Merge, Origin, Snapshot, split_parts, whole
from atomtrain.swarm.anchors.certificate import unsigned
from atomtrain.swarm.anchors.stamps import SLACK_VERSIONS, Stamp
from atomtrain.swarm.anchors.trainer_mailbox import RoundReport
from atomtrain.swarm.anchors.updates import OuterUpdate, Update
from atomtrain.swarm.codecs.codec import all_finite
from atomtrain.swarm.codecs.slices import Span, slice_spans
from atomtrain.swarm.rounds.bases import velocity_after
from atomtrain.swarm.rounds.context import Context
from atomtrain.swarm.rounds.exchange import Exchange
from atomtrain.swarm.rounds.exchange_setup import ExchangeResult, ExchangeSetup
from atomtrain.swarm.rounds.leader_io import exchange_bytes
from atomtrain.swarm.rounds.making import Made, Making
from atomtrain.swarm.rounds.proofs import Proven
from atomtrain.swarm.transport.messages import (
    TAKEN_BACK,
    Abandon,
    Begin,
    Certificate,
    Commit,
    Decline,
    Held,
    Invite,
    Message,
    Ready,
)
from atomtrain.swarm.transport.transport import Channel, Inbox, LinkLost, MessageT

_VIEWS_APART = 4
"""So many times more groups than this peer counts are no matter of a moment's difference."""


@dataclass(frozen=True)
class Decided:
    """Everything that the new anchor is computed from."""

    snapshot: Snapshot
    begin: Begin
    commit: Commit
    result: ExchangeResult


class Doubt(NamedTuple):
    """A round that this peer has given its part to, and whose decision it did not hear."""

    round_id: str
    snapshot: Snapshot
    members: tuple[str, ...]


class _Over(Exception):  # noqa: N818 - the ordinary end of a round without a result
    """The round ends here for this member, for the reason given."""


class RoundMember:
    """One member's part in one round."""

    def __init__(self, context: Context, invite: Invite, channel: Channel) -> None:
        """Prepare to follow `invite`, which came over `channel`."""
        self._context = context
        self.invite = invite
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._started_s = self._loop.time()
        self._inbox = Inbox(channel)
        self.exchange: Exchange | None = None
        self.exchange_known = asyncio.Event()
        self.in_doubt: Doubt | None = None
        self.begin: Begin | None = None
        """The group, once it is fixed."""
        self.proofs: list[Proven] = []
        """What shows others who lied in it."""
        self.astray = False
        """Most of the others' anchors are far from this member's."""

    async def run(self) -> None:
        """Follow the round to its end; leave its report, and what it changes, for the trainer."""
        try:
            decided = await self._follow()
        except (_Over, LinkLost, BadMessage) as error:
            self._abandoned(str(error))
            return
        finally:
            self._inbox.close()
        self._context.timing.observe_round(self._loop.time() - self._started_s)
        merge, report = await self._context.offload(self._conclude, decided)
        self._context.mailbox.leave_merge(merge, report)

    async def _follow(self) -> Decided:
        snapshot = await self._enter()
        stamp = snapshot.anchor.stamp
        await self._channel.send(
            Ready(
                version=stamp.version,
                tokens=stamp.tokens,
                digest=stamp.digest,
                weight=snapshot.weight,
                late=snapshot.late,
                certificate=self._context.certified.of(snapshot.fragment, stamp.digest),
            )
        )
        begin = await self._expect(Begin, self.invite.answer_s + self._context.timing.floor_s)
        if begin.round_id != self.invite.round_id:
            raise BadMessage("the leader began another round")
        check_begin(begin, stamp, self._context)
        self.begin = begin
        # The leader's deadline: an exchange, and its own floor, which is in the exchange.
        decided_by_s = self._loop.time() + 2 * begin.exchange_s
        if self._context.codec.feedback:
            lost = await self._context.offload(torch.zeros_like, snapshot.values)
            snapshot = replace(snapshot, lost=lost)
        result = await self._exchange(snapshot, begin)
        commit, result = await self._decision(result, begin, decided_by_s)
        if any(j >= len(result.means) or result.means[j] is None for j in commit.slices):
            raise BadMessage("the leader committed a slice that is not here")
        self.in_doubt = None
        self._count_absent(begin, commit)
        return Decided(snapshot, begin, commit, result)

    async def _decision(
        self, result: ExchangeResult, begin: Begin, decided_by_s: float
    ) -> tuple[Commit, ExchangeResult]:
        """Say what is held, anew if another member proves a lie meanwhile; return the decision."""
        assert self.exchange is not None, "its result is here"
        until_s = decided_by_s + self._context.timing.floor_s
        while True:
            await self._channel.send(Held(digests=result.digests))
            said = await self._hear_unless(self.exchange.shown, until_s)
            if said is None:
                await self._channel.send(TAKEN_BACK)
                said = await self._hear(until_s)
            if isinstance(said, Commit):
                return said, result
            if said != TAKEN_BACK:
                raise BadMessage(f"the leader sent {type(said).__name__}, not a decision")
            # It has decided nothing, and does not before it hears of the slices again.
            result = await self.exchange.again()
            self._distrust(result, begin)

    async def _hear_unless(self, event: asyncio.Event, until_s: float) -> Message | None:
        """Return what the leader says next; None if the event comes first."""
        happening = asyncio.create_task(event.wait())
        hearing = asyncio.create_task(self._inbox.peek(max(0.0, until_s - self._loop.time())))
        try:
            await asyncio.wait((happening, hearing), return_when=asyncio.FIRST_COMPLETED)
            return await self._hear(until_s) if hearing.done() else None
        finally:
            happening.cancel()
            hearing.cancel()

    def _count_absent(self, begin: Begin, commit: Commit) -> None:
        """Take the leader's word for who came: else each member would invite in vain anew.

        But for the group of this round only, which this peer knows by itself.
        """
        leader, me = self._channel.remote, self._context.peer_id
        group = self._context.group(self.invite.round_index)
        absent = set(group).intersection(commit.absent) - {leader, me}
        present = {leader, *begin.members} - absent
        self._context.absences.observe(self.invite.round_index, present=present, absent=absent)

    async def _enter(self) -> Snapshot:
        """Return the snapshot, or leave if the leader does first."""
        taking = asyncio.create_task(self._context.snapshot(self.invite.fragment))
        hearing = asyncio.create_task(self._inbox.peek(self.invite.answer_s))
        try:
            await asyncio.wait((taking, hearing), return_when=asyncio.FIRST_COMPLETED)
            if not taking.done():
                await self._expect(Begin, 0)  # raises: nothing may come before Ready but an end
        finally:
            taking.cancel()
            hearing.cancel()
        snapshot = taking.result()
        finite = await self._context.offload(all_finite, snapshot.values)
        if not finite:
            reason = "this peer's parameters are not finite"
            self._context.mailbox.begin_again()
            await self._channel.send(
                Decline(reason=reason, round_index=self._context.agenda.next_round)
            )
            raise _Over(reason)
        return snapshot

    async def _exchange(self, snapshot: Snapshot, begin: Begin) -> ExchangeResult:
        context = self._context
        setup = ExchangeSetup(
            peer_id=context.peer_id,
            leader=self._channel.remote,
            counted=context.standing.counts_me(self._channel.remote),
            snapshot=snapshot,
            codec=context.codec,
            open=partial(context.open, bulk=True),
            offload=context.offload,
            update=context.manifest.rules.outer,
            guard=context.manifest.rules.guard,
            usual_rms=context.standing.usual_rms(snapshot.fragment),
            excluded=context.standing.excluded(self.invite.round_index)
            | {peer_id for peer_id in begin.members if not context.roster.trusts(peer_id)},
            sign=context.transport.identity.sign,
            verify=context.transport.verify,
            on_unreachable=context.roster.suspect,
        )
        self.exchange = Exchange(setup, begin)
        self.in_doubt = Doubt(self.invite.round_id, snapshot, begin.members)
        self.exchange_known.set()
        started_s = self._loop.time()
        result = await self.exchange.run()
        duration_s = self._loop.time() - started_s
        for peer_id in (*result.accepted, *result.rejected):
            rejected = peer_id in result.rejected
            context.standing.observe(peer_id, self.invite.round_index, rejected=rejected)
        for peer_id, counted in result.counted.items():
            context.standing.observe_owner(peer_id, counted=counted)
        self._distrust(result, begin)
        others = len(begin.members) - 1
        self.astray = result.bases is not None and 2 * len(result.bases.strange) > others
        if duration_s < begin.exchange_s:
            size = exchange_bytes(context, snapshot.fragment, others + 1, begin.bases)
            context.timing.observe(size, duration_s)
        else:
            context.timing.failed()
        return result

    def _distrust(self, result: ExchangeResult, begin: Begin) -> None:
        for peer_id, why in result.lied.items():
            self._context.roster.distrust(peer_id, f"as an owner in round {begin.round_id}, {why}")
        self.proofs = result.proofs

    async def _hear(self, until_s: float) -> Message:
        """Return what the leader says next; what ends the round for this member is raised."""
        message = await self._inbox.get(max(0.0, until_s - self._loop.time()))
        if isinstance(message, Abandon):
            self.in_doubt = None
            raise _Over(message.reason)
        return message

    async def _expect(self, kind: type[MessageT], within_s: float) -> MessageT:
        message = await self._hear(self._loop.time() + within_s)
        if not isinstance(message, kind):
            raise BadMessage(f"the leader sent {type(message).__name__}, not {kind.__name__}")
        return message

    def _abandoned(self, reason: str) -> None:
        stamp = self._context.mailbox.stamp(self.invite.fragment)
        self._context.mailbox.report(
            RoundReport(
                round=self.invite.round_index,
                fragment=self.invite.fragment,
                version=0 if stamp is None else stamp.version,
                outcome="abandoned",
                duration_s=self._loop.time() - self._started_s,
                reason=reason,
            )
        )

    def _conclude(self, decided: Decided) -> tuple[Merge, RoundReport]:
        update = self._context.updates[0]
        merge = merge_of(decided, update, self._context.peer_id)
        means = [m for j in set(decided.commit.slices) if (m := decided.result.means[j])]
        self._context.standing.observe_means(
            merge.fragment,
            sum(mean.values.numel() for mean in means),
            sum(mean.square for mean in means),
        )
        me, after = self._context.peer_id, self.invite.round_index + 1
        if me in decided.result.rejected and me in self._context.standing.excluded(after):
            merge = replace(merge, restart=True)
        return merge, self._report(decided, merge)

    def _report(self, decided: Decided, merge: Merge) -> RoundReport:
        begin, everybody = decided.begin, frozenset(decided.begin.members)
        parts = merge.anchor.origin.parts
        used = frozenset().union(*(part.contributors for part in parts))
        contributors = tuple(member for member in begin.members if member in used)
        weights = dict(zip(begin.members, begin.weights, strict=True))
        awaited = frozenset(m for m in everybody if weights[m] > 0)
        missing = len(decided.result.means) - len(set(decided.commit.slices))
        lost = sorted(m[-8:] for m in awaited if any(m not in p.contributors for p in parts))
        channels = [self._channel, *decided.result.channels]
        reasons = [f"{missing} slices missing"] if missing else []
        reasons += [f"without part of {', '.join(lost)}"] if lost else []
        rejected = tuple(f"{m[-8:]}: {why}" for m, why in sorted(decided.result.rejected.items()))
        reasons += [f"rejected {text}" for text in rejected]
        reasons += ["this peer starts again from the anchor"] if merge.restart else []
        return RoundReport(
            round=self.invite.round_index,
            fragment=self.invite.fragment,
            version=merge.anchor.stamp.version,
            outcome="partial" if reasons else "averaged",
            contributors=contributors,
            weights=tuple(weights[member] for member in contributors),
            bytes_sent=sum(channel.sent_bytes for channel in channels),
            bytes_received=sum(channel.received_bytes for channel in channels),
            duration_s=self._loop.time() - self._started_s,
            reason="; ".join(reasons),
            rejected=rejected,
        )


def check_begin(begin: Begin, own: Stamp, context: Context) -> None:
    """Check what a leader says of a group against what this member knows.

    Raises:
        BadMessage: it cannot be true.
    """
    if begin.exchange_s > context.config.round_ceiling_s:
        raise BadMessage(f"the leader allows {begin.exchange_s:.0f} s for an exchange")
    if begin.bases and context.manifest.rules.group_size == 0:
        raise BadMessage("the leader has bases in a run without groups")
    if not begin.bases and (begin.version, begin.tokens) != (own.version, own.tokens):
        raise BadMessage("the leader began with another anchor than this member's")
    if begin.tokens < own.tokens or not 0 <= begin.version - own.version <= SLACK_VERSIONS:
        raise BadMessage("the leader's versions are no siblings of this member's")
    if not 1 <= begin.groups <= _VIEWS_APART * (1 + context.roster.groups):
        raise BadMessage(f"the leader speaks of {begin.groups} groups")
    if refusal := context.age.limit.refusal(_stamp_after(begin, sum(begin.weights))):
        raise BadMessage(f"the round would make {refusal}")


def merge_of(decided: Decided, update: Update, peer_id: str) -> Merge:
    """Return the new anchor that a decision makes of the old one, and how to merge it.

    Where nothing was decided each member keeps its own anchor's. The new anchor lies where the
    means did, which are gone then: everybody whose word the decision counts on has them.
    """
    snapshot, begin = decided.snapshot, decided.begin
    made = _made(decided, update)
    used = frozenset().union(*(part.contributors for part in made.parts))
    tokens = sum(w for m, w in zip(begin.members, begin.weights, strict=True) if m in used)
    stamp = _stamp_after(begin, tokens, made.digest)
    origin = Origin(begin.round_id, made.parts, _unsigned(decided, stamp, peer_id))
    anchor = Anchor(made.values, made.velocity, stamp, origin, grouped=begin.bases)
    changed, contributed = split_parts(made.parts, peer_id)
    own_velocity = _own_velocity(snapshot, update, contributed) if begin.bases else None
    return Merge(snapshot.fragment, anchor, changed, snapshot, contributed, velocity=own_velocity)


def _unsigned(decided: Decided, stamp: Stamp, peer_id: str) -> Certificate | None:
    """Return what the members sign that were there to the end; None where this one was alone."""
    survivors = {peer_id, *decided.begin.members}.difference(decided.commit.absent)
    parent = "" if decided.begin.bases else decided.snapshot.anchor.stamp.digest
    there = survivors if len(survivors) > 1 and peer_id in survivors else ()
    return unsigned(decided.snapshot.fragment, stamp, parent, there) if there else None


def _stamp_after(begin: Begin, tokens: int, digest: str = "") -> Stamp:
    """Return the stamp of what a round makes with so many tokens of its members."""
    return Stamp(begin.version, begin.tokens, "").next(begin.groups * tokens, digest)


def _made(decided: Decided, update: Update) -> Made:
    result, committed = decided.result, frozenset(decided.commit.slices)
    making = Making(decided.snapshot, decided.begin, update, result.values)
    for j, span in enumerate(slice_spans(result.values.numel(), len(result.means))):
        mean = result.means[j]
        if j not in committed or mean is None:
            making.keep(span)
        elif result.bases is not None:
            base = result.bases.values[span.start : span.stop]
            making.rebase(span, mean.values, base, mean.contributors)
        else:
            making.apply(span, mean.values, mean.contributors)
    return making.made()


def _own_velocity(
    snapshot: Snapshot, update: Update, contributed: tuple[Span, ...]
) -> torch.Tensor | None:
    assert isinstance(update, OuterUpdate), "gradients are averaged by one group of all"
    return velocity_after(snapshot, update, contributed)


def merge_of_fetched(
    fragment: int, anchor: Anchor, present: Anchor, doubt: Doubt | None, me: str
) -> Merge:
    """Return how to merge a fetched anchor.

    If the round in `doubt` made it out of the present one, progress is measured from the snapshot
    wherever this peer's contribution is in it.
    """
    elements = anchor.values.numel()
    if (
        doubt is None
        or anchor.origin.round_id != doubt.round_id
        or doubt.snapshot.anchor is not present
    ):
        return Merge(fragment, anchor, whole(elements))
    changed, contributed = split_parts(anchor.origin.parts, me)
    return Merge(fragment, anchor, changed, doubt.snapshot, contributed)
