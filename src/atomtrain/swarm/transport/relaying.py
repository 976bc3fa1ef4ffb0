"""A peer that others can dial passes streams on to those that nobody can.

A peer behind a NAT is dialled by nobody, but it can dial. So it stays on a stream to a relay, and
whoever wants it asks the relay:

    called -> relay    HoldOn                   on a stream that stays
    caller -> relay    RelayTo(called)          on a stream of its own
    relay -> called    Call(ticket, caller)     on the stream that stays
    called -> relay    TakeCall(ticket)         on a stream of its own
    relay -> caller    Joined

From then on the relay passes bytes both ways, and both ends agree on keys (`sealed`). Every stream
is opened towards the relay, so it dials nobody for others, and data takes the straight way to it.
It sees who talks to whom and how much, and nothing else. A relay that wants such a peer itself
calls it the same way, and the called peer's stream is the one it wanted.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from atomtrain.errors import BadMessage
from atomtrain.swarm.transport.messages import (
    Call,
    Holding,
    HoldOn,
    Joined,
    Message,
    RelayTo,
    TakeCall,
)
from atomtrain.swarm.transport.rates import Pacer
from atomtrain.swarm.transport.transport import Channel, LinkLost

_log = logging.getLogger("atomtrain.swarm")
_HELD_MAX = 128
_STREAMS_MAX, _STREAMS_EACH = 256, 64
"""Streams passed on at once, in all and for one caller."""
_PIECE_BYTES = 1 << 16
"""Bytes that wait here in each direction of a stream, at most."""
_LOOKS = 3
"""So often in a row a held peer is looked for among the members in vain before it is let go."""


@dataclass
class _Held:
    """A peer that is called over this stream."""

    channel: Channel
    sending: asyncio.Lock = field(default_factory=asyncio.Lock)
    joined: set[Channel] = field(default_factory=set)
    """Ends of the streams that are passed on to it."""


class Relay:
    """One peer's part in the streams of others; no task of its own."""

    def __init__(
        self,
        limit_bytes_per_s: float,
        answer_s: Callable[[str], float],
        idle_s: float,
        *,
        is_member: Callable[[str], bool] = lambda _: True,
        look_s: float = 30.0,
    ) -> None:
        """Pass on at most so many bytes a second in all, both directions added; 0: nothing.

        A called peer answers within `answer_s(peer)`; a stream on which nothing moves for `idle_s`
        is forgotten. Every `look_s` each held peer is looked for among the members (`is_member`).
        """
        self.limit_bytes_per_s = limit_bytes_per_s
        self.passed_bytes = 0
        """Bytes passed on so far, both directions added."""
        self._pacer = Pacer(limit_bytes_per_s) if limit_bytes_per_s else Pacer()
        self._answer_s, self._idle_s = answer_s, idle_s
        self._is_member, self._look_s = is_member, look_s
        self._held: dict[str, _Held] = {}
        self._calls: dict[str, tuple[str, asyncio.Future[Channel]]] = {}
        self._passing: Counter[str] = Counter()

    def status(self) -> dict[str, Any]:
        """Return for whom this peer relays, and how much, JSON-able."""
        return {
            "peers": sorted(self._held),
            "streams": self._passing.total(),
            "passed_bytes": self.passed_bytes,
        }

    def holds(self, peer_id: str) -> bool:
        """Say whether a peer can be called."""
        return peer_id in self._held

    def refusal(self, remote: str, message: Message, *, can_be_dialled: bool) -> str:
        """Return why a peer's wish is refused, or an empty string."""
        if isinstance(message, HoldOn):
            if not self.limit_bytes_per_s:
                return "it relays for nobody"
            if not can_be_dialled:
                return "it does not know yet that others can dial it"
            if len(self._held) >= _HELD_MAX and remote not in self._held:
                return f"it relays for {_HELD_MAX} peers already"
        elif isinstance(message, RelayTo):
            if message.peer_id not in self._held or message.peer_id == remote:
                return f"it does not relay to peer {message.peer_id[-8:]}"
            if self._passing[remote] >= _STREAMS_EACH or self._passing.total() >= _STREAMS_MAX:
                return "it relays as many streams as it can"
        return ""

    async def hold(self, channel: Channel) -> None:
        """Call a peer over this stream from now on, until the stream ends.

        Of a host that vanished without a word the stream may not end: who is no member any more is
        let go, too.

        Raises:
            LinkLost: the stream has ended, or the peer is gone.
        """
        peer_id = channel.remote
        if peer_id in self._held:  # that it comes again says that its last stream is a dead one
            self._held[peer_id].channel.close()
        held = self._held[peer_id] = _Held(channel)
        _log.info("relaying for peer %s", peer_id[-8:])
        try:
            await channel.send(Holding())
            await self._until_gone(channel)
        finally:
            if self._held.get(peer_id) is held:
                del self._held[peer_id]
            for end in held.joined:
                end.close()

    async def _until_gone(self, channel: Channel) -> None:
        ending = asyncio.ensure_future(channel.receive_some(memoryview(bytearray(1))))
        missed = 0
        try:  # nothing comes but the end
            while not (await asyncio.wait((ending,), timeout=self._look_s))[0]:
                missed = 0 if self._is_member(channel.remote) else missed + 1
                if missed == _LOOKS:
                    raise LinkLost(f"peer {channel.remote[-8:]} is no member any more")
            ending.result()
        finally:
            ending.cancel()

    async def call(self, peer_id: str, caller: str, *, bulk: bool) -> Channel:
        """Return a stream that a held peer opens; whoever called closes it.

        Raises:
            LinkLost: it is not held, or does not answer in time.
        """
        held = self._held.get(peer_id)
        if held is None:
            raise LinkLost(f"peer {peer_id[-8:]} is not held here")
        ticket = secrets.token_hex(16)
        coming: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()
        self._calls[ticket] = peer_id, coming
        try:
            async with asyncio.timeout(self._answer_s(peer_id)):
                async with held.sending:
                    await held.channel.send(Call(ticket=ticket, caller=caller, bulk=bulk))
                return await coming
        except BaseException as error:
            if coming.done() and not coming.cancelled():  # it came just now: nobody will close it
                coming.result().close()
            if isinstance(error, TimeoutError):
                raise LinkLost(f"peer {peer_id[-8:]} did not take a call in time") from error
            raise
        finally:
            del self._calls[ticket]

    def take(self, channel: Channel, said: TakeCall) -> None:
        """Hand the stream of a called peer to who called it, and now has to close it.

        Raises:
            BadMessage: nobody did, or not any more.
        """
        called, coming = self._calls.get(said.ticket, ("", None))
        if coming is None or coming.done() or called != channel.remote:
            raise BadMessage("it takes a call that nobody waits for")
        coming.set_result(channel)

    async def pass_on(self, caller: Channel, said: RelayTo) -> None:
        """Join a stream to the held peer that its caller wants; when one end closes, both do.

        Raises:
            LinkLost: one end is gone.
        """
        self._passing[caller.remote] += 1
        try:
            held = self._held.get(said.peer_id)
            called = await self.call(said.peer_id, caller.remote, bulk=said.bulk)
            assert held is not None
            ends = {caller, called}
            held.joined |= ends
            try:
                await caller.send(Joined())
                await self._both_ways(caller, called)
            finally:
                held.joined -= ends
                for end in ends:
                    end.close()
        finally:
            self._passing[caller.remote] -= 1
            self._passing += Counter()  # forgets those without streams

    async def _both_ways(self, one: Channel, other: Channel) -> None:
        pumps = [asyncio.ensure_future(self._pump(one, other)),
                 asyncio.ensure_future(self._pump(other, one))]  # fmt: skip
        try:
            while True:
                before = one.received_bytes + other.received_bytes
                done, _ = await asyncio.wait(
                    pumps, timeout=self._idle_s, return_when=asyncio.FIRST_COMPLETED
                )
                if done:
                    done.pop().result()
                    return
                if before == one.received_bytes + other.received_bytes:
                    raise LinkLost(f"nothing moved for {self._idle_s:.0f} s")
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, source: Channel, sink: Channel) -> None:
        piece = memoryview(bytearray(_PIECE_BYTES))
        while count := await source.receive_some(piece[: self._pacer.grant_bytes]):
            await self._pacer.turn(count)
            await sink.send_bytes(piece[:count])
            self.passed_bytes += count
