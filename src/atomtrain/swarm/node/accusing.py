"""How a proven lie gets around: who has seen it tells the others, who check it themselves.

    accuser -> other   Accuse, the liar's id
    other -> accuser   Heard, whether the proof is wanted
    accuser -> other   Proof, then its bytes

Nobody is expelled by hearsay: an accusation without a proof, or with one that shows nothing,
changes nothing for either. Who is convinced tells others in turn, once.
"""

from __future__ import annotations

import logging
import random

from atomtrain.errors import BadMessage
from atomtrain.swarm.node.network_thread import Tasks
from atomtrain.swarm.rounds.context import Context
from atomtrain.swarm.rounds.proofs import Proven, Rulebook, accused, judge_proof, proof_bytes
from atomtrain.swarm.transport.messages import Accuse, Heard, Proof
from atomtrain.swarm.transport.transport import Channel, LinkLost

_log = logging.getLogger("atomtrain.swarm")
_TOLD = 64
"""Peers that are told of a lie, at most."""
_CHECKED_AT_ONCE = 2


class Accusations:
    """One peer's proofs, of its own and of others; on its event loop."""

    def __init__(self, context: Context, tasks: Tasks) -> None:
        """Know of none."""
        self._context, self._tasks = context, tasks
        manifest = context.manifest
        self._rules = Rulebook(manifest.fragment_elements, context.codec, manifest.rules.guard)
        self._checking: set[str] = set()
        """Who has given the proofs that are being checked."""

    def tell(self, proven: Proven) -> None:
        """Tell others, in the background, 64 at most."""
        self._tasks.spawn(self._tell_all(proven), "telling of a lie")

    async def _tell_all(self, proven: Proven) -> None:
        liar = accused(proven.proof, self._rules)
        others = [r.peer_id for r in self._context.roster.others if r.peer_id != liar]
        for peer_id in random.sample(others, min(_TOLD, len(others))):
            try:
                await self._tell(peer_id, liar, proven)
            except (LinkLost, BadMessage) as error:
                _log.debug("peer %s was not told of a lie: %s", peer_id[-8:], error)

    async def _tell(self, peer_id: str, liar: str, proven: Proven) -> None:
        channel = await self._context.open(peer_id)
        try:
            if (await self._context.ask(channel, Accuse(peer_id=liar), Heard)).wanted:
                await channel.send(proven.proof)
                await channel.send_bytes(proven.data)
                await channel.wait_closed(channel.stall_s)
        finally:
            channel.close()

    async def hear(self, channel: Channel, accuse: Accuse) -> bool:
        """Hear another peer's accusation, and judge by its proof; says whether that was wanted.

        Raises:
            BadMessage: there is no proof.
            LinkLost: the stream is lost.
        """
        context, accuser = self._context, channel.remote
        known = context.standing.expelled(accuse.peer_id) or not context.roster.sees(accuse.peer_id)
        busy = accuser in self._checking or len(self._checking) >= _CHECKED_AT_ONCE
        await channel.send(Heard(wanted=not known and not busy))
        if known or busy:
            return False
        self._checking.add(accuser)
        try:
            proof = await channel.receive(Proof, channel.stall_s)
            data = bytearray(proof_bytes(proof, self._rules))
            await channel.receive_into(memoryview(data))
            proven = Proven(proof, bytes(data))
            verify = context.transport.verify
            owner, flaw = await context.offload(judge_proof, proven, self._rules, verify)
        finally:
            self._checking.discard(accuser)
        if not flaw or owner != accuse.peer_id:
            _log.info("peer %s accuses %s, and proves nothing", accuser[-8:], owner[-8:])
        elif not context.standing.expelled(owner):
            context.roster.distrust(
                owner, f"as an owner in round {proof.begin.round_id}, {flaw}; so peer "
                f"{accuser[-8:]} has proved",
            )  # fmt: skip
            self.tell(proven)
        return True
