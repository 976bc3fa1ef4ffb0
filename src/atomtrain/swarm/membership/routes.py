"""Streams to members: straight where they can be dialled, else through their relays."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from atomtrain.errors import BadMessage
from atomtrain.swarm.membership.deadlines import Waits
from atomtrain.swarm.membership.roster import Roster
from atomtrain.swarm.transport.addresses import Circuit, circuits_to, dialled
from atomtrain.swarm.transport.identity import Identity
from atomtrain.swarm.transport.messages import Joined, Open, RelayTo
from atomtrain.swarm.transport.relaying import Relay
from atomtrain.swarm.transport.sealed import SealedChannel, agree_as_caller
from atomtrain.swarm.transport.transport import Channel, LinkLost, Transport, begun

_log = logging.getLogger("atomtrain.swarm")
_INDIRECT_S = 600.0
"""How long a peer that could not be dialled, and has relays, is not dialled again."""
_Try = Callable[[float], Awaitable[Channel]]
"""Opens a stream, for which it has so many seconds."""


async def pass_through(
    inner: Channel, identity: Identity, peer_id: str, within_s: float, *, bulk: bool
) -> SealedChannel:
    """Return a stream to a peer through the one that `inner`, announced there, leads to.

    Raises:
        LinkLost: it does not lead there; `inner` is closed.
    """
    try:
        await inner.send(RelayTo(peer_id=peer_id, bulk=bulk))
        await inner.receive(Joined, within_s)
        return await agree_as_caller(inner, identity, peer_id)
    except (LinkLost, BadMessage) as error:
        inner.close()
        relay = inner.remote[-8:]
        raise LinkLost(f"no way to peer {peer_id[-8:]} through {relay}: {error}") from error
    except BaseException:
        inner.close()
        raise


class Routes:
    """Opens streams to members, and remembers which of them cannot be dialled."""

    def __init__(
        self,
        transport: Transport,
        roster: Roster,
        relay: Relay,
        opening: Callable[[str], Open],
        waits: Waits,
    ) -> None:
        """Open streams; `opening(peer)` is what comes first on those to relays.

        `relay` is this peer's own part in streams of others.
        """
        self.relay = relay
        self._transport, self._roster = transport, roster
        self._opening = opening
        self._waits = waits
        self._cannot_dial: set[str] = set()
        self._indirect_until_s: dict[str, float] = {}
        self._last: dict[str, str] = {}
        """By peer: the relay that led to it last."""

    def note_dialled(self, peer_id: str, *, answered: bool) -> None:
        """Remember whether a peer answered that was dialled anew."""
        (self._cannot_dial.discard if answered else self._cannot_dial.add)(peer_id)
        if answered:
            self._indirect_until_s.pop(peer_id, None)

    async def open(self, peer_id: str, *, bulk: bool) -> Channel:
        """Return a new stream to a member; `bulk`: much is going to flow.

        Raises:
            LinkLost: there is no way to it, or none was found within the connection deadline.
        """
        addresses = self._roster.addresses.get(peer_id, ())
        self._transport.learn(peer_id, dialled(addresses))
        tries = self._tries(peer_id, circuits_to(peer_id, addresses), bulk=bulk)
        loop = asyncio.get_running_loop()
        ways = 2 if bulk or len(tries) > 1 else 1
        until_s = loop.time() + ways * self._waits.answer_s(peer_id)
        lost = LinkLost(f"there is no way to peer {peer_id[-8:]}")
        for left in range(len(tries), 0, -1):
            begun_s = loop.time()
            share_s = (until_s - begun_s) / min(left, 2)
            try:
                async with asyncio.timeout(share_s):
                    channel = await tries[-left](share_s)
            except LinkLost as error:
                lost = error
            except TimeoutError:
                self._waits.missed(peer_id)
                lost = LinkLost(f"peer {peer_id[-8:]} cannot be reached in time")
            else:
                self._waits.observe_answer(peer_id, loop.time() - begun_s)
                return channel
        self._indirect_until_s.pop(peer_id, None)
        raise lost

    def _tries(self, peer_id: str, circuits: list[Circuit], *, bulk: bool) -> list[_Try]:
        """Return the ways to a peer, the one that is most likely to lead there first."""
        if not circuits:
            return [lambda s: self._transport.open(peer_id, bulk=bulk, within_s=s)]
        tries: list[_Try] = []
        me = self._transport.peer_id
        if self.relay.holds(peer_id):
            tries.append(lambda _: self.relay.call(peer_id, me, bulk=bulk))
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._indirect_until_s.get(peer_id, 0.0):
            tries.append(lambda s: self._dial(peer_id, s, bulk=bulk))
        others = [circuit for circuit in circuits if circuit.relay_id != me]
        tries += [partial(self._through, one, bulk) for one in sorted(others, key=self._rank)]
        return tries

    def _rank(self, circuit: Circuit) -> tuple[bool, bool, bytes]:
        """Return what sorts relays: those that answer, that of last time, else any by pair."""
        last = self._last.get(circuit.peer_id) == circuit.relay_id
        pair = f"{self._transport.peer_id} {circuit.peer_id} {circuit.relay_id}"
        score = hashlib.blake2b(pair.encode(), digest_size=8).digest()
        return not self._roster.answers(circuit.relay_id), not last, score

    async def _dial(self, peer_id: str, within_s: float, *, bulk: bool) -> Channel:
        """Open a stream to a peer that may be out of reach, or be connected with this one."""
        straight = bulk and peer_id not in self._cannot_dial
        try:
            return await self._transport.open(peer_id, bulk=straight, within_s=within_s)
        except (LinkLost, asyncio.CancelledError):  # that is how the deadline ends it
            until_s = asyncio.get_running_loop().time() + _INDIRECT_S
            self._indirect_until_s[peer_id] = until_s
            raise

    async def _through(self, circuit: Circuit, bulk: bool, within_s: float) -> Channel:
        relay_id = circuit.relay_id
        known = dialled(self._roster.addresses.get(relay_id, ()))
        self._transport.learn(relay_id, known or (circuit.relay_address,))
        inner = await self._transport.open(relay_id, bulk=bulk, within_s=within_s / 2)
        await begun(inner, self._opening(relay_id))
        channel = await pass_through(
            inner, self._transport.identity, circuit.peer_id, within_s, bulk=bulk
        )
        if self._last.get(circuit.peer_id) != relay_id:
            _log.info("peer %s is reached through %s", circuit.peer_id[-8:], relay_id[-8:])
            self._last[circuit.peer_id] = relay_id
        return channel
