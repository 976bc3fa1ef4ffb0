"""What the parts of a peer's network side share: who it is, its streams, members, and deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from atomtrain.swarm.anchors.anchors import Snapshot
from atomtrain.swarm.anchors.buffer_pool import pooled_empty
from atomtrain.swarm.anchors.stamps import SLACK_VERSIONS, RunAge
from atomtrain.swarm.anchors.trainer_mailbox import TrainerMailbox
from atomtrain.swarm.anchors.updates import Update
from atomtrain.swarm.codecs.codec import Codec
from atomtrain.swarm.membership.absences import Absences
from atomtrain.swarm.membership.admission import Admission
from atomtrain.swarm.membership.agenda import Agenda, group_of, groups_of, told_next
from atomtrain.swarm.membership.claims import Certified, Claims
from atomtrain.swarm.membership.config import PROTOCOL, Manifest, SwarmConfig
from atomtrain.swarm.membership.deadlines import RoundTiming, Waits
from atomtrain.swarm.membership.known_peers import KnownPeers
from atomtrain.swarm.membership.roster import Roster
from atomtrain.swarm.membership.routes import Routes
from atomtrain.swarm.membership.standing import Standing
from atomtrain.swarm.rounds.owning import Offload
from atomtrain.swarm.transport.messages import Message, Open
from atomtrain.swarm.transport.rates import Pacer
from atomtrain.swarm.transport.transport import (
    Channel,
    Directory,
    LinkLost,
    MessageT,
    Transport,
    begun,
)


@dataclass(frozen=True, kw_only=True)
class Context:
    """One peer's network side, as seen by its tasks; all on one event loop."""

    config: SwarmConfig
    manifest: Manifest
    transport: Transport
    directory: Directory
    admission: Admission
    mailbox: TrainerMailbox
    roster: Roster
    agenda: Agenda
    timing: RoundTiming
    codec: Codec
    standing: Standing
    updates: list[Update]
    """The one update that rounds apply; replaced before the first round where training makes it."""
    offload: Offload
    random_id: Callable[[], str]
    """Returns a short text that no other call returns."""
    clock: Callable[[], float]
    """Returns the swarm's time."""
    age: RunAge
    """What claims of anchors are measured by."""
    known: KnownPeers
    """Peers that the run has had."""
    pacer: Pacer
    """Limits what all streams together send."""
    routes: Routes
    """How members are reached."""
    waits: Waits
    """How long they are waited for."""
    claims: Claims
    """Which of the others' claims count."""
    certified: Certified
    """The certificates of anchors that this peer has."""
    absences: Absences = field(default_factory=Absences)
    """Who was invited and took no part."""

    @property
    def peer_id(self) -> str:
        """This peer's id."""
        return self.transport.peer_id

    def group(self, round_index: int) -> list[str]:
        """Return the members of this peer's group in a round, in the order in which they lead."""
        peers = {record.peer_id for record in self.roster.training()} | {self.peer_id}
        size = self.manifest.rules.group_size
        return group_of(self.config.run, round_index, peers, size, self.peer_id)

    def groups_told(self, round_index: int) -> list[list[str]]:
        """Return the groups that this peer, when it leads a round, tells of it."""
        peers = {record.peer_id for record in self.roster.training()} | {self.peer_id}
        size = self.manifest.rules.group_size
        groups = groups_of(self.config.run, round_index, peers, size)
        mine = next(i for i, group in enumerate(groups) if self.peer_id in group)
        return [groups[i] for i in told_next(mine, len(groups))]

    def slack(self, fragment: int) -> int:
        """Return how many versions apart anchors of a fragment may be and still be siblings.

        0: there is one anchor. Where there were several groups just now, there may be several yet.
        """
        several = self.roster.groups > 1 or self.mailbox.grouped(fragment)
        return SLACK_VERSIONS if several else 0

    async def open(self, peer_id: str, *, bulk: bool = False) -> Channel:
        """Return a stream on which protocol and run have been announced; `bulk`: for much data.

        Raises:
            LinkLost: the peer cannot be reached by the connection deadline.
        """
        channel = await self.routes.open(peer_id, bulk=bulk)
        self.roster.meet(peer_id)
        self.adopt(channel)
        return await begun(channel, self.opening(peer_id))

    def adopt(self, channel: Channel) -> None:
        """Have a stream with another peer obey this one's limit, and its deadlines."""
        channel.pacer = self.pacer
        # No reference to the stream itself: it goes, with its buffers, when nobody has it any more.
        channel.stall = partial(self.waits.stall_s, channel.remote)

    def opening(self, peer_id: str) -> Open:
        """Return what comes first on a stream to a peer."""
        return opening_to(peer_id, self.admission)

    async def ask(self, channel: Channel, question: Message, kind: type[MessageT]) -> MessageT:
        """Return the short answer to a question, and learn how long it took.

        Raises:
            LinkLost: there is none in time.
            BadMessage: it is another one.
        """
        loop, peer_id = asyncio.get_running_loop(), channel.remote
        begun_s, within_s = loop.time(), self.waits.answer_s(peer_id)
        try:
            await channel.send(question)
            answer = await channel.receive(kind, within_s)
        except LinkLost:
            if loop.time() - begun_s >= within_s:
                self.waits.missed(peer_id)
            raise
        self.waits.observe_answer(peer_id, loop.time() - begun_s)
        return answer

    async def snapshot(self, fragment: int) -> Snapshot:
        """Return a snapshot taken at the trainer's next boundary; cancel to withdraw the wish."""
        loop = asyncio.get_running_loop()
        taken: asyncio.Future[Snapshot] = loop.create_future()

        def resolve(snapshot: Snapshot) -> None:
            if not taken.done():
                taken.set_result(snapshot)

        elements = self.manifest.fragment_elements[fragment]
        into = self.mailbox.take_spare(elements)
        if into is None:
            into = await self.offload(_written, elements)
        self.mailbox.want_snapshot(fragment, into, lambda s: _into(loop, resolve, s))
        try:
            return await taken
        finally:
            self.mailbox.withdraw(fragment)


def opening_to(peer_id: str, admission: Admission) -> Open:
    """Return what comes first on a stream to a peer."""
    return Open(protocol=PROTOCOL, run=admission.run, proof=admission.proof(peer_id))


def _written(elements: int) -> torch.Tensor:
    return pooled_empty(elements).fill_(0)  # not zeros(): those are not in memory yet


def _into(
    loop: asyncio.AbstractEventLoop, call: Callable[[Snapshot], None], value: Snapshot
) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(call, value)
