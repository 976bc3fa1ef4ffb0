"""A peer's part in the sequence of rounds: proposing, leading, following, or going on alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from msgspec.structs import replace

from atomtrain.errors import BadMessage, SwarmError
from atomtrain.swarm.anchors.anchors import Snapshot
from atomtrain.swarm.anchors.stamps import SLACK_VERSIONS, Stamp
from atomtrain.swarm.anchors.trainer_mailbox import RoundReport
from atomtrain.swarm.catchup.repair import Repairer
from atomtrain.swarm.codecs.codec import all_finite
from atomtrain.swarm.node.network_thread import Tasks
from atomtrain.swarm.node.newcomers import Newcomers
from atomtrain.swarm.rounds.context import Context
from atomtrain.swarm.rounds.leader_io import LeaderIO
from atomtrain.swarm.rounds.making import merge_alone
from atomtrain.swarm.rounds.proofs import Proven
from atomtrain.swarm.rounds.round_member import RoundMember
from atomtrain.swarm.transport.memory import channel_pair
from atomtrain.swarm.transport.messages import (
    AskAgain,
    Begin,
    Contribution,
    Decline,
    Invite,
    Propose,
    Proposed,
)
from atomtrain.swarm.transport.transport import Channel, LinkLost

_log = logging.getLogger("atomtrain.swarm")
_LEADERS_TRIED = 3


class Group(NamedTuple):
    """Who averages, or has averaged, in a round that this peer is a member of."""

    invite: Invite
    begin: Begin
    """Its members reduce one run of slices each, in this order."""
    under_way: bool


class Rounds:
    """One round led and one followed at a time, at most."""

    def __init__(
        self,
        context: Context,
        tasks: Tasks,
        repairer: Repairer,
        serve: Callable[[Channel], Coroutine[Any, Any, None]],
        tell: Callable[[Proven], None],
    ) -> None:
        """`serve` serves the streams that this peer opens to itself; `tell` tells of lies."""
        self._tell_of = tell
        self._context = context
        self._tasks = tasks
        self._repairer = repairer
        self._serve = serve
        self.active = False
        """Whether this peer takes part."""
        self._leading: asyncio.Task[None] | None = None
        self._proposing = False
        self.newcomers = Newcomers(context.config.expiry_s, asyncio.get_running_loop().time)
        self._lost_s: float | None = None
        """Since when this peer is alone because others do not answer."""
        self._following: dict[str, RoundMember] = {}
        self._last: tuple[Invite, Begin] | None = None

    @property
    def under_way(self) -> bool:
        """This peer leads a round, or is in one."""
        return self._context.agenda.running is not None or self._leading is not None

    @property
    def moving(self) -> bool:
        """A round is under way that does not wait for this peer's trainer."""
        return self.under_way and not self._context.mailbox.snapshot_wanted

    def groups(self) -> list[Group]:
        """Return the groups of the round under way, if it has one, and of the last one."""
        found = [Group(one.invite, one.begin, True) for one in self._following.values()
                 if one.begin is not None]  # fmt: skip
        return found + ([Group(*self._last, False)] if self._last is not None else [])

    def on_boundary(self, steps: int) -> None:
        """Count steps; propose the next round if it is due."""
        agenda = self._context.agenda
        members = self._context.roster.training()
        step_s = min((record.step_s for record in members if record.step_s > 0), default=0.0)
        agenda.pace(max((record.round_s for record in members), default=0.0), step_s)
        progress = self._context.mailbox.progress
        agenda.share(sum(record.tokens_per_s for record in members), progress.step_s)
        agenda.late_rounds = int(self._context.roster.groups > 1)
        agenda.add_steps(steps)
        now_s = asyncio.get_running_loop().time()
        free = self._leading is None and not self._proposing
        if self.active and free and agenda.due(now_s):
            self._proposing = True
            self._tasks.spawn(self._propose(), "proposal")

    async def _propose(self) -> None:
        context, agenda = self._context, self._context.agenda
        loop = asyncio.get_running_loop()
        try:
            order = context.group(agenda.next_round)
            if order == [context.peer_id]:
                # An anchor made alone is one that the others refuse, or have to try.
                if self._waits_for_others(loop.time()) or self._waits_for_newcomers:
                    agenda.ask_again(loop.time() + context.config.expiry_s / 30)
                else:
                    self.newcomers.forget()
                    await go_alone(context, self._repairer, agenda.next_round, self._stays_alone)
                return
            self._lost_s = None
            if not self.newcomers.coming:
                self.newcomers.forget()  # those who come later have their time, too
            retry_s = 2 * max(map(context.waits.answer_s, order))  # it invites, too
            leader = agenda.propose_to(order, loop.time(), retry_s)
            if leader == context.peer_id:
                self._lead(agenda.next_round)
            else:
                await self._propose_to(leader)
        finally:
            self._proposing = False

    @property
    def _waits_for_newcomers(self) -> bool:
        """Those who join are to get anchors that are not replaced before their first round."""
        return self.newcomers.coming and not self._context.mailbox.store.gradients

    def _stays_alone(self) -> bool:
        return self.active and not self._waits_for_newcomers

    def _waits_for_others(self, now_s: float) -> bool:
        """Say whether those who failed may answer again before this peer goes on alone.

        What they signed may last for an hour: no longer than this peer's own records last.
        """
        context = self._context
        if not context.roster.may_answer_again:
            self._lost_s = None
            return False
        if self._lost_s is None:
            self._lost_s = now_s
        return now_s - self._lost_s < context.config.expiry_s + context.waits.late_s

    async def _propose_to(self, leader: str) -> None:
        context, agenda = self._context, self._context.agenda
        answer = await self._tell(leader, agenda.next_round)
        if answer is None:
            agenda.ask_next()
            return
        agenda.observe(answer.round_index)
        if not answer.accepted:  # it is busy; another leader would only split the members
            agenda.ask_again(asyncio.get_running_loop().time() + context.config.expiry_s / 30)

    async def _tell(self, leader: str, round_index: int) -> Proposed | None:
        """Propose a round to whom it is to lead; return the answer, None if there is none."""
        context = self._context
        try:
            channel = await context.open(leader)
        except LinkLost as error:
            _log.debug("proposal: %s", error)
            context.roster.suspect(leader)
            return None
        try:
            return await context.ask(channel, Propose(round_index=round_index), Proposed)
        except (LinkLost, BadMessage) as error:
            _log.debug("proposal: %s", error)
            return None
        finally:
            channel.close()

    def _lead(self, round_index: int) -> None:
        self._leading = self._tasks.spawn(self._lead_round(round_index), f"leading {round_index}")
        if self._context.roster.groups > 1:
            self._tasks.spawn(self._tell_other_groups(round_index), f"telling of {round_index}")

    async def _tell_other_groups(self, round_index: int) -> None:
        """Have two other groups begin the round, too; what their leaders answer is their matter."""
        for order in self._context.groups_told(round_index):
            for leader in order[:_LEADERS_TRIED]:
                if await self._tell(leader, round_index) is not None:
                    break

    async def _lead_round(self, round_index: int) -> None:
        try:
            done = await LeaderIO(self._context, round_index, self._open_to).run()
            _log.debug("led round %s: %s", done.call.round_id, done.result)
            self._context.agenda.observe(max(done.newer_round, round_index + 1))
        finally:
            self._leading = None

    async def _open_to(self, peer_id: str) -> Channel:
        context = self._context
        if peer_id != context.peer_id:
            return await context.open(peer_id)
        mine, theirs = channel_pair(peer_id, peer_id, context.config.endpoint.stall_s)
        self._tasks.spawn(self._serve(theirs), "own stream")
        await mine.send(context.opening(context.peer_id))
        return mine

    async def consider(self, proposer: str, message: Propose) -> Proposed:
        """Answer a proposal, and lead the round if it is due."""
        agenda, roster = self._context.agenda, self._context.roster
        if not roster.trains(proposer):
            roster.update(await self._context.directory.records())
        agenda_is_free = agenda.running is None and self._leading is None
        reason = ""
        if not agenda_is_free and not agenda.is_over(message.round_index):
            reason = "a round is under way"
        elif refusal := agenda.refusal(message.round_index):
            reason = refusal
        elif not roster.trains(proposer):  # it would not be invited, and the round be over for it
            reason = "there is no record yet by which its proposer trains"
        else:
            self._lead(message.round_index)
        return Proposed(accepted=not reason, round_index=agenda.next_round, reason=reason)

    async def follow(self, channel: Channel, invite: Invite) -> bool:
        """Follow an invitation to the round's end; say whether the last word was this peer's."""
        agenda = self._context.agenda
        fragment = agenda.fragment(invite.round_index)
        ceiling_s = self._context.config.round_ceiling_s
        invite = replace(invite, answer_s=min(invite.answer_s, ceiling_s))
        refusal = await self._stranger(channel.remote, invite) or await self._ripe(invite, fragment)
        if refusal:
            await channel.send(Decline(reason=refusal, round_index=agenda.next_round))
            return True
        agenda.begin(invite.round_index, invite.round_id)
        self._repairer.busy.add(fragment)
        member = self._following[invite.round_id] = RoundMember(self._context, invite, channel)
        try:
            await self._catch_up(channel.remote, invite)
            await member.run()
        finally:
            del self._following[invite.round_id]
            for proven in member.proofs:
                self._tell_of(proven)
            if member.begin is not None:
                self._last = (invite, member.begin)
            agenda.end(invite.round_index)
            self._repairer.free(fragment)
            self._repairer.doubts.pop(fragment, None)
            if member.in_doubt is not None:
                self._repairer.doubts[fragment] = member.in_doubt
            if member.astray:
                self._repairer.astray.add(fragment)
            self._fetch_stale()
        return False

    def _fetch_stale(self) -> None:
        """Begin at a round's end: those that follow closely may use it whenever this peer looks."""
        this = asyncio.current_task()
        going_on = self.active and not (this is not None and this.cancelling())
        if going_on and self._repairer.wanted:
            self._tasks.spawn(self._repairer.repair(), "repair")

    async def _stranger(self, leader: str, invite: Invite) -> str:
        """Return why a leader is none, or an empty string.

        Only members call to rounds, and in their own name: ids of rounds are never used twice.
        """
        roster, directory = self._context.roster, self._context.directory
        if not invite.round_id.startswith(f"{invite.round_index}-{leader[-8:]}-"):
            return "that is not the id of a round that it leads"
        if leader != self._context.peer_id and not roster.sees(leader):
            roster.update(await directory.records())
            if not roster.sees(leader):
                return "its leader has no membership record"
        claim = self._context.age.limit.refusal(Stamp(invite.version, 0, ""))
        if claim or not roster.trusts(leader):
            return "what its leader says of anchors cannot be true, or did harm here"
        return ""

    async def _ripe(self, invite: Invite, fragment: int) -> str:
        """Wait until this peer is free for a round; return why not, or an empty string.

        A round that is about to end, or a fetch, is waited for: declining at once would leave this
        peer behind again and again when rounds follow each other closely.
        """
        agenda = self._context.agenda
        if fragment != invite.fragment:
            return f"round {invite.round_index} averages fragment {fragment}"
        self._repairer.awaited.add(fragment)
        self._repairer.make_way(fragment)
        try:
            async with asyncio.timeout(invite.answer_s / 2):
                while self.active and not agenda.is_over(invite.round_index):
                    if agenda.running is None and fragment not in self._repairer.busy:
                        return agenda.refusal(invite.round_index)
                    if invite.round_index == agenda.running_round:
                        break
                    self._repairer.freed.clear()
                    await self._repairer.freed.wait()
        except TimeoutError:
            return f"still busy in round {agenda.running}, or fetching"
        finally:
            self._repairer.awaited.discard(fragment)
        if not self.active:
            return "this peer takes no part now"
        return agenda.refusal(invite.round_index)

    async def _catch_up(self, leader: str, invite: Invite) -> None:
        """Fetch the leader's anchor if this peer's is older; without it the round goes on.

        A leader that is behind knows it, and fetches from another. Siblings are not older.
        """
        own = self._context.mailbox.stamp(invite.fragment)
        slack = min(invite.slack, SLACK_VERSIONS)
        if own is None or own.version + slack >= invite.version:
            return
        if not self._context.claims.keeps(leader):
            return
        try:
            async with asyncio.timeout(invite.answer_s):
                if leader == self._context.peer_id:
                    await self._repairer.repair_one(invite.fragment)
                else:
                    await self._repairer.repair_from(leader, invite.fragment)
        except (SwarmError, TimeoutError) as error:
            _log.info("catching up for round %s: %s", invite.round_id, error)

    async def take(self, channel: Channel, header: Contribution | AskAgain) -> None:
        """Serve a slice stream of the round under way; raises `LinkLost` or `BadMessage`."""
        member = self._following.get(header.round_id)
        if member is None:
            raise BadMessage(f"round {header.round_id[:60]} is not under way here")
        async with asyncio.timeout(channel.stall_s):
            await member.exchange_known.wait()
        assert member.exchange is not None
        await member.exchange.serve(channel, header)


async def go_alone(
    context: Context, repairer: Repairer, round_index: int, stays_alone: Callable[[], bool]
) -> None:
    """Let the anchor follow the parameters in a round that nobody else is in.

    Not if somebody comes, or this peer leaves, before the trainer has given them: others may have
    made another anchor of that version.
    """
    fragment = context.agenda.fragment(round_index)
    if fragment in repairer.busy or context.agenda.refusal(round_index):
        return
    context.agenda.begin(round_index, f"{round_index}-alone")
    repairer.busy.add(fragment)
    started_s = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(context.config.round_ceiling_s):
            snapshot = await context.snapshot(fragment)
        if not stays_alone():
            return
        if not await context.offload(all_finite, snapshot.values):
            context.mailbox.begin_again()
            context.mailbox.report(_kept(snapshot, round_index))
            return
        store, update = context.mailbox.store, context.updates[0]
        merge = await context.offload(merge_alone, store, update, snapshot)
        report = RoundReport(
            round=round_index,
            fragment=fragment,
            version=merge.anchor.stamp.version,
            outcome="averaged",
            contributors=(context.peer_id,),
            weights=(snapshot.weight,),
            duration_s=asyncio.get_running_loop().time() - started_s,
            reason="alone",
        )
        context.mailbox.leave_merge(merge, report)
    finally:
        context.agenda.end(round_index)
        repairer.free(fragment)


def _kept(snapshot: Snapshot, round_index: int) -> RoundReport:
    """Return the report of a round that leaves the anchor as it is: others would not take it."""
    return RoundReport(
        round=round_index,
        fragment=snapshot.fragment,
        version=snapshot.anchor.stamp.version,
        outcome="abandoned",
        reason="this peer's parameters are not finite",
    )
