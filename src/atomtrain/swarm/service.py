"""A peer's network side: tasks on one event loop that serve, lead, follow, publish and repair.

It talks to the training thread through the `Desk` only, and to other peers through a `Transport`
and a `Directory`: tests run it on a virtual clock over a network in memory.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any

from atomtrain.errors import SwarmError
from atomtrain.swarm.agenda import lead_order
from atomtrain.swarm.anchors import Anchor, Merge, Snapshot, whole
from atomtrain.swarm.config import PROTOCOL
from atomtrain.swarm.context import Context
from atomtrain.swarm.desk import RoundReport
from atomtrain.swarm.leading import Leading
from atomtrain.swarm.membering import Membering
from atomtrain.swarm.memory import channel_pair
from atomtrain.swarm.messages import (
    AskAnchor,
    AskManifest,
    BadMessage,
    Contribution,
    Decline,
    Invite,
    Message,
    Open,
    Propose,
    Proposed,
    Refused,
)
from atomtrain.swarm.records import JOINING, LEFT, TRAINING, PeerRecord
from atomtrain.swarm.transfer import (
    Fetcher,
    ask_anchor,
    merge_of_fetched,
    send_anchor,
    send_manifest,
)
from atomtrain.swarm.transport import Channel, LinkLost

_log = logging.getLogger("atomtrain.swarm")
_STREAMS_MAX = 1024


class Service:
    """Everything a peer does on the network; all methods run on its event loop."""

    def __init__(self, context: Context) -> None:
        """Prepare; nothing runs before `start`."""
        self.context = context
        self.state = JOINING
        self.fetcher = Fetcher(context)
        self._tasks: set[asyncio.Task[None]] = set()
        self._publish_soon = asyncio.Event()
        self._leading: asyncio.Task[None] | None = None
        self._proposing = False
        self._repairing = False
        self._membering: dict[str, Membering] = {}
        self._busy: set[int] = set()
        self._freed = asyncio.Event()
        self._doubts: dict[int, tuple[str, Snapshot]] = {}

    async def start(self) -> None:
        """Serve streams, publish, and read the membership records once before returning."""
        await self.context.transport.serve(self._serve)
        await self._beat()
        self._spawn(self._heartbeat(), "heartbeat")

    async def stop(self, deadline_s: float) -> None:
        """Say goodbye, let a round under way end within the deadline, close everything."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + deadline_s
        self.state = LEFT
        try:
            async with asyncio.timeout_at(until_s):
                await self._publish()
                while self._round_moves():
                    await asyncio.sleep(0.02)
        except TimeoutError:
            _log.info("left the swarm before a round under way had ended")
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.context.transport.close()

    def _round_moves(self) -> bool:
        """Say whether a round is under way that does not wait for this peer's trainer."""
        running = self.context.agenda.running or self._leading is not None
        return bool(running) and not self.context.desk.snapshot_wanted

    def set_training(self) -> None:
        """Take part in rounds from now on."""
        self.state = TRAINING
        self._publish_soon.set()

    def on_boundary(self, steps: int, merges: int) -> None:
        """Hear that the trainer has passed a boundary."""
        agenda = self.context.agenda
        agenda.add_steps(steps)
        if merges:
            self._publish_soon.set()
        now_s = asyncio.get_running_loop().time()
        free = self._leading is None and not self._proposing
        if self.state == TRAINING and free and agenda.due(now_s):
            self._proposing = True
            self._spawn(self._propose(), "proposal")

    # Membership -----------------------------------------------------------------------------

    async def _heartbeat(self) -> None:
        expiry_s = self.context.config.expiry_s
        while True:
            await asyncio.sleep(expiry_s / 30)  # however often there is news
            try:
                async with asyncio.timeout(expiry_s / 5):
                    await self._publish_soon.wait()
            except TimeoutError:
                pass
            await self._beat()

    async def _beat(self) -> None:
        self._publish_soon.clear()
        context = self.context
        try:
            async with asyncio.timeout(context.config.expiry_s):
                await self._publish()
                context.roster.update(await context.directory.records())
        except (TimeoutError, OSError, SwarmError) as error:
            _log.warning("membership records could not be exchanged: %s", error)
            return
        context.agenda.observe(context.roster.next_round())
        if self.state == TRAINING and not self._repairing and self._stale() is not None:
            self._repairing = True
            self._spawn(self._repair(), "repair")

    async def _publish(self) -> None:
        context = self.context
        record = self.own_record()
        context.roster.set_own(record)
        await context.directory.publish(record.encode(), context.config.expiry_s)

    def own_record(self) -> PeerRecord:
        """Return what this peer tells all others."""
        context = self.context
        progress = context.desk.progress
        return PeerRecord(
            peer_id=context.peer_id,
            name=context.config.name,
            state=self.state,
            sequence=time.time(),
            addresses=(context.transport.address,),
            next_round=context.agenda.next_round,
            steps=progress.steps,
            tokens=progress.tokens,
            tokens_per_s=progress.tokens_per_s,
            step_s=progress.step_s,
            stamps=context.desk.store.stamps(),
        )

    # Stale fragments ------------------------------------------------------------------------

    def _stale(self) -> int | None:
        for fragment, best in enumerate(self.context.roster.best()):
            own = self.context.desk.stamp(fragment)
            if best is None or own is None or fragment in self._busy:
                continue
            if best.beats(own):
                return fragment
        return None

    async def _repair(self) -> None:
        try:
            while (fragment := self._stale()) is not None:
                self._busy.add(fragment)
                try:
                    await self._repair_one(fragment)
                finally:
                    self._free(fragment)
        except SwarmError as error:
            _log.warning("%s", error)
        finally:
            self._repairing = False

    async def _repair_one(self, fragment: int) -> None:
        started_s = asyncio.get_running_loop().time()
        patience_s = self.context.config.expiry_s
        anchor, received_bytes = await self.fetcher.fetch(fragment, patience_s)
        if not self._leave_fetched(fragment, anchor, received_bytes, started_s):
            raise SwarmError(f"no peer gave a newer anchor of fragment {fragment}; trying later")

    async def _repair_from(self, donor: str, fragment: int) -> None:
        started_s = asyncio.get_running_loop().time()
        anchor, received_bytes = await ask_anchor(self.context, donor, fragment)
        self._leave_fetched(fragment, anchor, received_bytes, started_s)

    def _leave_fetched(
        self, fragment: int, anchor: Anchor, received_bytes: int, started_s: float
    ) -> bool:
        """Have a fetched anchor merged; says False, and does nothing, if it is no better."""
        context = self.context
        own = context.desk.stamp(fragment)
        if own is None or not anchor.stamp.beats(own):
            return False
        doubt = self._doubts.pop(fragment, None)
        present = context.desk.store.anchor(fragment)
        merge = merge_of_fetched(fragment, anchor, present, doubt, context.peer_id)
        report = RoundReport(
            round=context.agenda.next_round,
            fragment=fragment,
            version=anchor.stamp.version,
            outcome="fetched",
            bytes_received=received_bytes,
            duration_s=asyncio.get_running_loop().time() - started_s,
        )
        context.desk.leave_merge(merge, report)
        return True

    # Rounds ---------------------------------------------------------------------------------

    async def _propose(self) -> None:
        context, agenda = self.context, self.context.agenda
        loop = asyncio.get_running_loop()
        try:
            live = {record.peer_id for record in context.roster.training()} | {context.peer_id}
            if live == {context.peer_id}:
                await self._alone(agenda.next_round)
                return
            order = lead_order(context.config.run, agenda.next_round, live)
            leader = agenda.propose_to(order, loop.time(), context.config.connect_s)
            if leader == context.peer_id:
                self._lead(agenda.next_round)
            else:
                await self._propose_to(leader)
        finally:
            self._proposing = False

    async def _propose_to(self, leader: str) -> None:
        context, agenda = self.context, self.context.agenda
        try:
            channel = await context.open(leader)
        except LinkLost as error:
            _log.debug("proposal: %s", error)
            context.roster.suspect(leader)
            agenda.postpone(0.0)
            return
        try:
            await channel.send(Propose(round_index=agenda.next_round))
            answer = await channel.receive(Proposed, context.config.connect_s)
            agenda.observe(answer.round_index)
        except (LinkLost, BadMessage) as error:
            _log.debug("proposal: %s", error)
            agenda.postpone(0.0)
        finally:
            channel.close()

    def _lead(self, round_index: int) -> None:
        self._leading = self._spawn(self._lead_round(round_index), f"leading {round_index}")

    async def _lead_round(self, round_index: int) -> None:
        try:
            done = await Leading(self.context, round_index, self._open_to).run()
            _log.debug("led round %s: %s", done.call.round_id, done.result)
            self.context.agenda.observe(max(done.newer_round, round_index + 1))
        finally:
            self._leading = None

    async def _open_to(self, peer_id: str) -> Channel:
        context = self.context
        if peer_id != context.peer_id:
            return await context.open(peer_id)
        mine, theirs = channel_pair(peer_id, peer_id, context.config.stall_s)
        self._spawn(self._serve(theirs), "own stream")
        await mine.send(Open(protocol=PROTOCOL, run=context.config.run))
        return mine

    async def _alone(self, round_index: int) -> None:
        """Let the anchor follow the parameters: whoever comes next starts from them."""
        context = self.context
        fragment = context.agenda.fragment(round_index)
        if fragment in self._busy or context.agenda.refusal(round_index):
            return
        context.agenda.begin(round_index, f"{round_index}-alone")
        self._busy.add(fragment)
        started_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(context.config.round_ceiling_s):
                snapshot = await context.snapshot(fragment)
            merge = await context.offload(self._follow_local, snapshot)
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
            context.desk.leave_merge(merge, report)
        finally:
            context.agenda.end(round_index)
            self._free(fragment)

    def _follow_local(self, snapshot: Snapshot) -> Merge:
        old = snapshot.anchor.stamp
        anchor = self.context.desk.store.fresh(
            snapshot.values, version=old.version + 1, tokens=old.tokens + snapshot.weight
        )
        spans = whole(snapshot.values.numel())
        return Merge(snapshot.fragment, anchor, (), snapshot, spans)

    # Incoming streams -----------------------------------------------------------------------

    async def _serve(self, channel: Channel) -> None:
        """Serve one incoming stream to its end; the edge of its task."""
        try:
            if len(self._tasks) > _STREAMS_MAX:
                raise BadMessage("too many streams at once")
            answered_last = await self._answer(channel)
            if answered_last:  # closing before the other side has read all might cut it short
                await channel.wait_closed(self.context.config.stall_s)
        except (LinkLost, BadMessage, TimeoutError) as error:
            _log.debug("stream of %s ended: %s", channel.remote[-8:], error)
        except Exception:  # noqa: BLE001 - the edge of the stream's task
            _log.exception("serving a stream of peer %s failed", channel.remote[-8:])
        finally:
            channel.close()

    async def _answer(self, channel: Channel) -> bool:
        """Do what a stream asks for; say whether the last word on it was this peer's."""
        config = self.context.config
        opening = await channel.receive(Open, config.stall_s)
        message = await channel.receive_any(config.stall_s)
        refusal = self._refusal(opening, message)
        if refusal:
            await channel.send(Refused(reason=refusal, run=config.run, protocol=PROTOCOL))
        elif isinstance(message, AskManifest):
            await send_manifest(channel, self.context.manifest)
        elif isinstance(message, AskAnchor):
            anchor = self.context.desk.store.anchor(message.fragment)
            await send_anchor(channel, message.fragment, anchor)
        elif isinstance(message, Propose):
            await channel.send(self._consider(message))
        elif isinstance(message, Invite):
            return await self._follow(channel, message)
        elif isinstance(message, Contribution):
            await self._take(channel, message)
        return True

    def _refusal(self, opening: Open, message: Message) -> str:
        run = self.context.config.run
        if opening.protocol != PROTOCOL:
            return f"it speaks protocol {PROTOCOL}, not {opening.protocol}"
        if opening.run != run:
            return f"it trains run {run!r}, not {opening.run!r}"
        if isinstance(message, AskAnchor):
            stamps = self.context.desk.store.stamps()
            if message.fragment >= len(stamps) or stamps[message.fragment] is None:
                return "it does not have this fragment"
        elif not isinstance(message, AskManifest | Propose | Invite | Contribution):
            return f"{message.kind} does not open a stream"
        return ""

    def _consider(self, message: Propose) -> Proposed:
        agenda = self.context.agenda
        agenda_is_free = agenda.running is None and self._leading is None
        reason = ""
        if self.state != TRAINING:
            reason = f"this peer is {self.state}"
        elif message.round_index < agenda.next_round:
            reason = f"round {message.round_index} is over"
        elif not agenda_is_free:
            reason = "a round is under way"
        else:
            self._lead(message.round_index)
        return Proposed(accepted=not reason, round_index=agenda.next_round, reason=reason)

    async def _follow(self, channel: Channel, invite: Invite) -> bool:
        agenda = self.context.agenda
        fragment = agenda.fragment(invite.round_index)
        refusal = await self._ripe(invite, fragment)
        if refusal:
            await channel.send(Decline(reason=refusal, round_index=agenda.next_round))
            return True
        agenda.begin(invite.round_index, invite.round_id)
        self._busy.add(fragment)
        membering = self._membering[invite.round_id] = Membering(self.context, invite, channel)
        try:
            await self._catch_up(channel.remote, invite)
            await membering.run()
        finally:
            del self._membering[invite.round_id]
            agenda.end(invite.round_index)
            self._free(fragment)
            self._doubts.pop(fragment, None)
            if membering.in_doubt is not None:
                self._doubts[fragment] = (invite.round_id, membering.in_doubt)
        return False

    async def _ripe(self, invite: Invite, fragment: int) -> str:
        """Wait until this peer is free for a round; return why not, or an empty string.

        A round that is about to end, or a fetch, is waited for: declining at once would leave this
        peer behind again and again when rounds follow each other closely.
        """
        agenda = self.context.agenda
        if fragment != invite.fragment:
            return f"round {invite.round_index} averages fragment {fragment}"
        try:
            async with asyncio.timeout(invite.answer_s / 2):
                while self.state == TRAINING and invite.round_index >= agenda.next_round:
                    if agenda.running is None and fragment not in self._busy:
                        return ""
                    if invite.round_index == agenda.running_round:
                        break
                    self._freed.clear()
                    await self._freed.wait()
        except TimeoutError:
            return f"still busy in round {agenda.running}, or fetching"
        if self.state != TRAINING:
            return f"this peer is {self.state}"
        return agenda.refusal(invite.round_index)

    async def _catch_up(self, leader: str, invite: Invite) -> None:
        """Fetch the leader's anchor if this peer's is older; without it the round goes on."""
        own = self.context.desk.stamp(invite.fragment)
        if own is None or own.version >= invite.version:
            return
        try:
            async with asyncio.timeout(invite.answer_s):
                await self._repair_from(leader, invite.fragment)
        except (LinkLost, BadMessage, TimeoutError) as error:
            _log.info("catching up for round %s: %s", invite.round_id, error)

    def _free(self, fragment: int) -> None:
        self._busy.discard(fragment)
        self._freed.set()

    async def _take(self, channel: Channel, header: Contribution) -> None:
        membering = self._membering.get(header.round_id)
        if membering is None:
            raise BadMessage(f"round {header.round_id[:60]} is not under way here")
        async with asyncio.timeout(self.context.config.stall_s):
            await membering.exchange_known.wait()
        assert membering.exchange is not None
        await membering.exchange.serve(channel, header)

    # Odds and ends --------------------------------------------------------------------------

    async def fetch(self, fragment: int, patience_s: float) -> Anchor:
        """Return the swarm's anchor of a fragment; raises `SwarmError`."""
        anchor, _ = await self.fetcher.fetch(fragment, patience_s)
        return anchor

    def _spawn(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        task = asyncio.create_task(self._guard(work, what))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guard(self, work: Coroutine[Any, Any, None], what: str) -> None:
        """Run a task to its end; the edge at which unexpected errors are logged."""
        try:
            await work
        except Exception:  # noqa: BLE001 - the edge of the task
            _log.exception("peer %s: %s failed", self.context.peer_id[-8:], what)
