"""The leader's streams: one to each member, for invitation, answer, group, report and decision."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from atomtrain.errors import BadMessage
from atomtrain.swarm.anchors.stamps import Stamp, best_of, supersedes
from atomtrain.swarm.codecs.codec import base_codec, encoded_bytes
from atomtrain.swarm.codecs.slices import Span, slices_per_member
from atomtrain.swarm.rounds.context import Context
from atomtrain.swarm.rounds.leader_state import LeaderRound, Outgoing, Phase, RoundCall
from atomtrain.swarm.transport.messages import Decline, Invite, Message, Ready, Refused
from atomtrain.swarm.transport.transport import Channel, LinkLost, PeerRefused

_log = logging.getLogger("atomtrain.swarm")
_Event = tuple[str, Message | None]
SAID_MAX = 8
"""Messages of a member, at most: that it is ready, what it holds, and thrice that it is other."""
_LOOK_S = 1.0
"""How often it is seen whether those that have not answered are members still."""


class LeaderIO:
    """Drives one `LeaderRound` over real streams until it is done."""

    def __init__(
        self, context: Context, round_index: int, open_to: Callable[[str], Awaitable[Channel]]
    ) -> None:
        """Prepare to lead; `open_to` opens streams, to this peer itself as well."""
        self._context = context
        self._open_to = open_to
        self._events: asyncio.Queue[_Event] = asyncio.Queue()
        self._channels: dict[str, Channel] = {}
        self._loop = asyncio.get_running_loop()
        fragment = context.agenda.fragment(round_index)
        group = context.absences.invited(context.peer_id, context.group(round_index), round_index)
        members = [record for record in context.roster.training() if record.peer_id in group]
        slack = context.slack(fragment)
        # A leader may be behind itself.
        best = context.roster.best(certain=True)[fragment]
        stamp = best_of((context.mailbox.stamp(fragment), best))
        # Members that are behind fetch the whole anchor before they answer.
        anchor_bytes = 4 * context.manifest.fragment_elements[fragment]
        anchor_bytes *= 1 + context.mailbox.store.momentum
        waited_for = [r for r in members if context.roster.patient_with(r.peer_id, round_index)]
        behind = [
            r.fetch_bytes_per_s for r in waited_for if is_behind(r.stamps[fragment], stamp, slack)
        ]
        fetch_s = context.timing.fetch_s(anchor_bytes, behind)
        call = RoundCall(
            round_id=f"{round_index}-{context.peer_id[-8:]}-{context.random_id()}",
            round_index=round_index,
            fragment=fragment,
            version=0 if stamp is None else stamp.version,
            answer_s=fetch_s + context.timing.answer_s(record.step_s for record in waited_for),
            exchange_s=lambda group, bases: context.timing.exchange_s(
                exchange_bytes(context, fragment, group, bases)
            ),
            slices_each=lambda group: slices_per_member(
                context.manifest.fragment_elements[fragment], group
            ),
            decision_s=context.timing.floor_s,
            groups=context.roster.groups,
            slack=slack,
            limit=context.age.limit,
            refused=context.roster.refused,
            certain=lambda member, stamp: context.roster.certain(
                member, fragment, stamp, context.mailbox.stamp(fragment)
            ),
            lowered=partial(context.standing.lowered, context.peer_id),
            leader=context.peer_id,
            trusted=context.roster.trusts,
        )
        self._round = LeaderRound(call, [r.peer_id for r in members], self._loop.time())

    async def run(self) -> LeaderRound:
        """Lead until the decision has been sent; never raises for a member's sake."""
        invitations = self._round.start()
        talks = {m: asyncio.create_task(self._talk(m, i)) for m, i in invitations}
        watch = asyncio.create_task(self._watch(talks))
        outgoing: Outgoing = []
        try:
            while self._round.phase is not Phase.DONE:
                outgoing = await self._next()
                await self._send(outgoing)
            # Members close their streams when they have read the decision; others are told none.
            if told := [talks[member] for member, _ in outgoing]:
                await asyncio.wait(told, timeout=self._context.timing.floor_s)
            for member in self._round.late:
                self._context.roster.was_late(member, self._round.call.round_index)
            self._context.absences.observe(
                self._round.call.round_index,
                present=self._round.survivors,
                absent=self._round.absent - {self._context.peer_id},
            )
        finally:
            for task in (watch, *talks.values()):
                task.cancel()
            for channel in self._channels.values():
                channel.close()
        return self._round

    async def _watch(self, talks: Mapping[str, asyncio.Task[None]]) -> None:
        """Wait for no answer of a member whose record has expired.

        The time for an answer is that of a fetch, which may be long; who lives renews its record
        meanwhile. A process that stands still keeps its streams, so nothing else would tell.
        """
        while self._round.phase is Phase.FORMING:
            await asyncio.sleep(_LOOK_S)
            for member in self._round.unanswered - {self._context.peer_id}:
                if not self._context.roster.sees(member):
                    talks[member].cancel()
                    self._lost(member)

    async def _next(self) -> Outgoing:
        try:
            async with asyncio.timeout_at(self._round.deadline_s):
                member, message = await self._events.get()
        except TimeoutError:
            return self._round.on_tick(self._loop.time())
        if message is None:
            return self._round.on_lost(member, self._loop.time())
        return self._round.on_message(member, message, self._loop.time())

    async def _send(self, outgoing: Outgoing) -> None:
        async def send(member: str, message: Message) -> None:
            try:
                await self._channels[member].send(message)
            except LinkLost:
                self._lost(member)

        await asyncio.gather(*(send(member, message) for member, message in outgoing))

    def _lost(self, member: str) -> None:
        """Have the round go on without a member; `LeaderRound.on_lost` says what that means."""
        self._events.put_nowait((member, None))

    async def _talk(self, member: str, invite: Message) -> None:
        assert isinstance(invite, Invite)
        try:
            channel = await self._open_to(member)
        except LinkLost as error:
            _log.debug("round %s: %s", invite.round_id, error)
            self._context.roster.suspect(member)
            self._lost(member)
            return
        self._channels[member] = channel
        try:
            await channel.send(invite)
            for said in itertools.count():
                message = await channel.receive_any(self._context.config.round_ceiling_s * 2)
                if isinstance(message, Refused):  # it leaves: its next record says so
                    self._context.roster.suspect(member)
                    raise PeerRefused(member, message)
                if said == SAID_MAX:
                    raise BadMessage("it says more than there is to say")
                if isinstance(message, Ready):
                    certificate, fragment = message.certificate, self._round.call.fragment
                    self._context.certified.hear(fragment, message.digest, certificate)
                self._events.put_nowait((member, message))
                if isinstance(message, Decline):
                    channel.close()
                    return
        except (LinkLost, BadMessage) as error:
            _log.debug("round %s: %s", invite.round_id, error)
            self._lost(member)


def is_behind(stamp: Stamp | None, best: Stamp | None, slack: int) -> bool:
    """Say whether a member, by its record, has to fetch an anchor before it is ready."""
    return best is not None and (stamp is None or supersedes(best, stamp, slack))


def exchange_bytes(context: Context, fragment: int, group: int, bases: bool = False) -> int:
    """Return the bytes that each of `group` members sends, and receives, in an exchange."""
    whole = Span(0, context.manifest.fragment_elements[fragment])
    codecs = [context.codec, context.codec.for_mean(group, 0)]
    codecs += [base_codec(context.codec)] if bases else []
    return int((group - 1) / group * sum(encoded_bytes(codec, whole) for codec in codecs))
