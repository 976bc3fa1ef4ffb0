"""A peer's network side: tasks on one event loop that serve, lead, follow, publish and repair.

It talks to the training thread through the `TrainerMailbox` only, and to other peers through a
`Transport` and a `Directory`: tests run it on a virtual clock over a network in memory.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import replace
from enum import Enum

from atomtrain.errors import BadMessage, SwarmError
from atomtrain.swarm.anchors.anchors import Anchor
from atomtrain.swarm.anchors.trial import Refusal
from atomtrain.swarm.catchup.certifying import send_certificates
from atomtrain.swarm.catchup.donating import Donations
from atomtrain.swarm.catchup.fetching import Fetcher
from atomtrain.swarm.catchup.joining import send_manifest
from atomtrain.swarm.catchup.repair import Repairer
from atomtrain.swarm.catchup.vouching import send_known
from atomtrain.swarm.membership.config import PROTOCOL
from atomtrain.swarm.membership.lan import Found, Responder
from atomtrain.swarm.membership.records import EXPIRY_S_MAX, JOINING, LEFT, TRAINING, PeerRecord
from atomtrain.swarm.node.accusing import Accusations
from atomtrain.swarm.node.network_thread import Tasks
from atomtrain.swarm.node.probe import send_pong, send_status
from atomtrain.swarm.node.reachability import Reach, Relays, Reunion
from atomtrain.swarm.node.round_loop import Rounds
from atomtrain.swarm.rounds.context import Context
from atomtrain.swarm.transport.addresses import dialled
from atomtrain.swarm.transport.buckets import Bounds
from atomtrain.swarm.transport.messages import (
    OPENING_BYTES_MAX,
    Accuse,
    AskAgain,
    AskAnchor,
    AskCertificate,
    AskDial,
    AskKnown,
    AskManifest,
    AskStatus,
    Contribution,
    Dialled,
    HoldOn,
    Invite,
    Message,
    Open,
    Ping,
    Propose,
    Refused,
    RelayTo,
    TakeCall,
)
from atomtrain.swarm.transport.rates import Usage
from atomtrain.swarm.transport.transport import Channel, LinkLost

_log = logging.getLogger("atomtrain.swarm")
_STREAMS, _STREAMS_EACH = 1024, 128
"""Incoming streams served at once, in all and from one peer."""
_MET_AT_ONCE = 64
_DIALLED_AT_ONCE = 32
"""Peers that are dialled because they ask for it, each at one address of its own choice."""
_GIVEN_UP_S = 5.0
"""How long what a round has made is not wanted, once it did harm here."""
_PAUSE_BEATS = 8.0
_OPENING = (
    Accuse, AskCertificate, AskManifest, AskStatus, Ping, AskDial, HoldOn, RelayTo, TakeCall,
    Propose, Invite, Contribution, AskAgain,
)  # fmt: skip


class _After(Enum):
    """What becomes of a stream that was answered."""

    CLOSE = 1
    CLOSE_WHEN_READ = 2
    """Closing before the other side has read all might cut it short."""
    KEEP = 3
    """It is somebody else's now."""


def beat_pause_s(expiry_s: float, beat_s: float) -> tuple[float, float]:
    """Return how long a peer waits from one beat to the next, with news and without any.

    Records take at most a ninth of the time, going by how long the last beat took, `beat_s`: the
    larger the swarm and the busier machine and link, the longer a beat. But they must not expire.
    """
    most_s = expiry_s / 30 + expiry_s / 5
    return min(max(expiry_s / 30, _PAUSE_BEATS * beat_s), expiry_s / 5), most_s


def _loop_s() -> float:
    return asyncio.get_running_loop().time()


class Service:
    """Everything a peer does on the network; all methods run on its event loop."""

    def __init__(self, context: Context) -> None:
        """Prepare; nothing runs before `start`."""
        self.context = context
        self.state = JOINING
        self._tasks = Tasks(context.peer_id)
        self._repairer = Repairer(context)
        self._accusations = Accusations(context, self._tasks)
        self._rounds = Rounds(
            context, self._tasks, self._repairer, self._serve, self._accusations.tell
        )
        self._reunion = Reunion(context)
        self._reach = Reach(context)
        self._responder: Responder | None = None
        self._usage = Usage(time.monotonic)
        self._publish_soon = asyncio.Event()
        self._relays = Relays(context, self._tasks, self._serve, self._publish_soon.set)
        self._streams: Counter[str] = Counter()
        fragments = len(context.manifest.fragment_elements)
        self._bounds = Bounds(context.peer_id, fragments, _loop_s)
        self._donations = Donations()
        self._meeting = False
        self._dialling: set[str] = set()
        """Peers that asked to be dialled, and are."""

    async def start(self) -> None:
        """Serve streams, publish, and read the membership records once before returning."""
        await self.context.transport.serve(self._serve)
        await self._beat()
        self._tasks.spawn(self._heartbeat(), "heartbeat")
        self._tasks.spawn(self.context.waits.stalls.watch(), "stalls")

    async def be_found(self) -> None:
        """Answer those who search the local network for runs, if this peer is to."""
        config, transport = self.context.config, self.context.transport
        if config.discoverable:
            found = Found(config.run, config.name, transport.address, PROTOCOL)
            self._responder = await Responder.start(found, config.endpoint.listen_host)

    async def stop(self, deadline_s: float) -> None:
        """Say goodbye, let a round under way end within the deadline, close everything."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + deadline_s
        self.state = LEFT
        self._rounds.active = False
        if self._responder is not None:
            self._responder.close()
        try:
            async with asyncio.timeout_at(until_s):
                await self._publish()
                while self._rounds.moving:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            _log.info("left the swarm before a round under way had ended")
        finally:
            await self._tasks.cancel_all()
            await self.context.transport.close()

    def withdraw(self) -> None:
        """Enter no round any more; one that this peer is in goes on."""
        self._rounds.active = False
        self._repairer.freed.set()  # who waits to enter one declines

    def say_goodbye(self) -> None:
        """Have all others know soon that this peer takes part no more."""
        self.state = LEFT
        self._publish_soon.set()

    @property
    def in_rounds(self) -> bool:
        """A round is under way here, or the next one may begin; from any thread."""
        return self._rounds.active or self._rounds.under_way

    @property
    def busy(self) -> bool:
        """A round is under way here that does not wait for the trainer; from any thread."""
        return self._rounds.moving

    def set_training(self) -> None:
        """Take part in rounds from now on."""
        self.state = TRAINING
        self._rounds.active = True
        self._publish_soon.set()

    def on_boundary(self, steps: int, merges: int) -> None:
        """Hear that the trainer has passed a boundary."""
        if merges:
            self._publish_soon.set()
        self._rounds.on_boundary(steps)

    def on_merged(self, anchor: Anchor) -> None:
        """Hear that an anchor has become this peer's own; sign it if it was made with others."""
        if anchor.origin.unsigned is not None:
            self.context.certified.sign(anchor.origin.unsigned)

    def on_refusal(self, refusal: Refusal) -> None:
        """Hear that an anchor did harm, and was not taken.

        What a round has made did less harm, or none, to those who were in it and kept it. Where
        they are the larger part, this peer has to come back to them.
        """
        roster, digest = self.context.roster, refusal.stamp.digest
        if not refusal.donor:
            roster.refuse(digest, _GIVEN_UP_S)
        else:
            if digest not in roster.refused:
                roster.bar(refusal.donor)
            roster.refuse(digest)
        self._publish_soon.set()  # the anchor that this peer goes on from may be a new one

    # Membership -----------------------------------------------------------------------------

    async def _heartbeat(self) -> None:
        loop = asyncio.get_running_loop()
        beat_s = 0.0
        while True:
            least_s, most_s = beat_pause_s(self.context.config.expiry_s, beat_s)
            await asyncio.sleep(least_s)  # however often there is news
            try:
                async with asyncio.timeout(most_s - least_s):
                    await self._publish_soon.wait()
            except TimeoutError:
                pass
            begun_s = loop.time()
            await self._beat()
            beat_s = loop.time() - begun_s

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
        for record in context.roster.others:
            context.waits.observe_beat(record.peer_id, record.sequence)
        context.agenda.observe(context.roster.next_round())
        context.known.remember(context.roster.members, time.time())
        context.standing.save()
        if not self._meeting and (strangers := context.roster.strangers):
            self._tasks.spawn(self._meet(strangers[:_MET_AT_ONCE]), "meeting strangers")
        if not self._reunion.running and (lost := self._reunion.due()):
            self._tasks.spawn(self._reunion.look(lost), "reunion")
        repairer = self._repairer
        repairer.note_coming()
        if self.state == TRAINING and repairer.wanted:
            self._tasks.spawn(repairer.repair(), "repair")
        if self.state == TRAINING and not self.fetcher.certifier.looking:
            self._tasks.spawn(self._look_for_certificates(), "certificates")
        if self.state != LEFT:
            if ask := self._reach.due():
                self._tasks.spawn(self._ask_to_be_dialled(ask), "asking to be dialled")
            self._relays.look(needed=self._reach.needs_relays)

    async def _look_for_certificates(self) -> None:
        """Ask for what makes claims count, and fetch what counts then."""
        await self.fetcher.certifier.look()
        if self._repairer.wanted:
            await self._repairer.repair()

    async def _meet(self, strangers: list[str]) -> None:
        """Find out who is there, so that no round has to: anybody can make up members."""

        async def meet(peer_id: str) -> None:
            try:
                (await self.context.open(peer_id)).close()
            except LinkLost:
                self.context.roster.suspect(peer_id)

        self._meeting = True
        try:
            await asyncio.gather(*map(meet, strangers))
        finally:
            self._meeting = False

    async def _ask_to_be_dialled(self, peer_ids: list[str]) -> None:
        await self._reach.ask(peer_ids)
        self._relays.look(needed=self._reach.needs_relays)

    async def _publish(self) -> None:
        context = self.context
        record = self.own_record()
        context.roster.set_own(record)
        sealed = context.admission.seal(record.encode())
        life_s = context.config.expiry_s + context.waits.late_s
        await context.directory.publish(sealed, min(life_s, EXPIRY_S_MAX))

    def own_record(self) -> PeerRecord:
        """Return what this peer tells all others."""
        context = self.context
        progress, timing = context.mailbox.progress, context.timing
        return PeerRecord(
            peer_id=context.peer_id,
            manifest=context.roster.manifest,
            name=context.config.name,
            state=self.state,
            sequence=context.clock(),
            addresses=(context.transport.address, *self._relays.addresses),
            next_round=context.agenda.next_round,
            steps=progress.steps,
            tokens=progress.tokens,
            tokens_per_s=progress.tokens_per_s,
            step_s=progress.step_s,
            round_s=timing.round_s,
            free_bytes_per_s=self._usage.free_bytes_per_s(
                timing.moved_bytes, timing.link_bytes_per_s
            ),
            fetch_bytes_per_s=timing.fetch_bytes_per_s,
            stamps=context.mailbox.store.stamps(),
        )

    # Incoming streams -----------------------------------------------------------------------

    async def _serve(self, channel: Channel) -> None:
        """Serve one incoming stream to its end; the edge of its task."""
        if not self._bounds.admits_stream(channel):
            channel.close()
            return
        if channel.remote != self.context.peer_id:
            self.context.adopt(channel)
        self._streams[channel.remote] += 1
        after = _After.CLOSE
        try:
            if self._streams[channel.remote] > _STREAMS_EACH or self._streams.total() > _STREAMS:
                raise BadMessage("too many streams at once")
            self.context.roster.meet(channel.remote)
            after = await self._answer(channel)
            if after is _After.CLOSE_WHEN_READ:
                await channel.wait_closed(channel.stall_s)
        except (LinkLost, BadMessage, TimeoutError) as error:
            _log.debug("stream of %s ended: %s", channel.remote[-8:], error)
        except Exception:  # noqa: BLE001 - the edge of the stream's task
            _log.exception("serving a stream of peer %s failed", channel.remote[-8:])
        finally:
            self._streams[channel.remote] -= 1
            self._streams += Counter()  # forgets those without streams
            if after is not _After.KEEP:
                channel.close()

    async def _answer(self, channel: Channel) -> _After:
        """Do what a stream asks for; say what becomes of it."""
        config = self.context.config
        try:
            opening = await channel.receive(Open, channel.stall_s, OPENING_BYTES_MAX)
        except BadMessage as error:  # as peers of another version begin: they are told so
            refusal = f"it speaks protocol {PROTOCOL} and does not understand this one: {error}"
            await channel.send(Refused(reason=refusal, run=config.run, protocol=PROTOCOL))
            return _After.CLOSE_WHEN_READ
        message = await channel.receive_any(channel.stall_s, OPENING_BYTES_MAX)
        refusal = self._refusal(channel.remote, opening, message)
        if refusal := refusal or self._bounds.refusal(channel, message):
            await channel.send(Refused(reason=refusal, run=config.run, protocol=PROTOCOL))
        elif isinstance(message, Accuse):
            proved = await self._accusations.hear(channel, message)
            return _After.CLOSE if proved else _After.CLOSE_WHEN_READ
        elif isinstance(message, Invite):
            if await self._rounds.follow(channel, message):
                return _After.CLOSE_WHEN_READ
            self._bounds.called_for(channel)
            return _After.CLOSE
        elif isinstance(message, Contribution | AskAgain):
            await self._rounds.take(channel, message)
            self._bounds.called_for(channel)
        elif isinstance(message, AskDial):
            await self._dial(channel, message)
        elif isinstance(message, HoldOn | RelayTo):
            relay = self.context.routes.relay
            if isinstance(message, HoldOn):
                await relay.hold(channel)
            else:
                try:
                    await relay.pass_on(channel, message)
                finally:  # one end may break off in the middle
                    self._bounds.called_for(channel)
            return _After.CLOSE
        elif isinstance(message, TakeCall):
            self.context.routes.relay.take(channel, message)
            self._bounds.called_for(channel)
            return _After.KEEP
        else:
            await self._answer_question(channel, message)
        return _After.CLOSE_WHEN_READ

    async def _answer_question(self, channel: Channel, message: Message) -> None:
        """Answer what wants nothing but an answer."""
        if isinstance(message, AskManifest | AskAnchor) and not self.context.roster.trains(
            channel.remote
        ):
            self._rounds.newcomers.hear()
        if isinstance(message, AskManifest):
            await send_manifest(channel, self.context)
        elif isinstance(message, AskAnchor):
            anchor = self.context.mailbox.store.anchor(message.fragment)
            certificate = self.context.certified.of(message.fragment, anchor.stamp.digest)
            anchor = replace(anchor, certificate=certificate)
            await self._donations.send(channel, message, anchor)
        elif isinstance(message, AskCertificate):
            await send_certificates(channel, self.context, message)
        elif isinstance(message, AskKnown):
            await send_known(channel, self.context, message)
        elif isinstance(message, AskStatus):
            await send_status(channel, self.context, self._rounds.groups())
        elif isinstance(message, Ping):
            await send_pong(channel, self.context, message)
        elif isinstance(message, Propose):
            answer = await self._rounds.consider(channel.remote, message)
            if answer.accepted:
                self._bounds.called_for(channel)
            await channel.send(answer)

    async def _dial(self, channel: Channel, ask: AskDial) -> None:
        """Dial the peer that asks for it, at an address of its own only."""
        if not dialled([ask.address]) or not ask.address.endswith(f"/{channel.remote}"):
            raise BadMessage("an address that is not its own")
        if channel.remote in self._dialling or len(self._dialling) >= _DIALLED_AT_ONCE:
            raise BadMessage("as many are dialled already as may be")
        self._dialling.add(channel.remote)
        try:
            answered = await self.context.transport.answers(
                ask.address, self.context.waits.dial_s()
            )
        finally:
            self._dialling.discard(channel.remote)
        self.context.routes.note_dialled(channel.remote, answered=answered)
        await channel.send(Dialled(answered=answered))

    def _refusal(self, remote: str, opening: Open, message: Message) -> str:
        run = self.context.config.run
        if opening.protocol != PROTOCOL:
            return f"it speaks protocol {PROTOCOL}, not {opening.protocol}"
        if opening.run != run:
            return f"it trains run {run!r}, not {opening.run!r}"
        if refusal := self.context.admission.refusal(remote, opening.proof):
            return refusal
        if isinstance(message, AskManifest) and self.state == LEFT:
            return "it has finished, and leaves the run"
        if isinstance(message, AskAnchor | AskKnown):
            stamps = self.context.mailbox.store.stamps()
            if message.fragment >= len(stamps) or stamps[message.fragment] is None:
                return "it does not have this fragment"
        elif isinstance(message, Propose | Invite) and not self._rounds.active:
            return "it takes no part in rounds now"
        elif isinstance(message, HoldOn | RelayTo):
            if self.state == LEFT:
                return "it leaves the run"
            relay, reached = self.context.routes.relay, self._reach.can_be_dialled
            return relay.refusal(remote, message, can_be_dialled=reached)
        elif not isinstance(message, _OPENING):
            return f"{type(message).__name__} does not open a stream"
        return ""

    @property
    def fetcher(self) -> Fetcher:
        """What gets anchors from others."""
        return self._repairer.fetcher

    async def fetch(self, fragment: int, patience_s: float) -> Anchor:
        """Return the swarm's anchor of a fragment; raises `SwarmError`."""
        return (await self.fetcher.fetch(fragment, patience_s)).anchor
