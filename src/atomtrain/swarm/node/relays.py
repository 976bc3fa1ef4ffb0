"""The relays of a peer that others cannot dial: found without a coordinator, replaced when lost.

Any member that can be dialled will do. Each peer prefers others in an order of its own (a hash), so
the work is shared; it stays on a stream to a few of them, and tells everybody through its
membership record. A relay that dies ends its stream, and the next in the order takes its place.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

from atomtrain.swarm.membership.records import TEXT_MAX
from atomtrain.swarm.node.network_thread import Tasks
from atomtrain.swarm.rounds.context import Context
from atomtrain.swarm.transport.addresses import circuits_to, dialled, through
from atomtrain.swarm.transport.messages import BadMessage, Call, Holding, HoldOn, TakeCall
from atomtrain.swarm.transport.rates import Pacer
from atomtrain.swarm.transport.sealed import agree_as_called
from atomtrain.swarm.transport.transport import Channel, Handler, LinkLost

_log = logging.getLogger("atomtrain.swarm")
_WANTED = 3
"""Relays of one peer: one of them may die, one be out of reach for somebody."""
_AVOID_S = 10.0
_CALLS_EACH = 64
"""Calls of one relay that are answered at once."""
_CALL_S = 86_400.0
"""Without a call for so long, another relay may be as good."""


class Relays:
    """The peers that call this one when others want it."""

    def __init__(
        self, context: Context, tasks: Tasks, serve: Handler, changed: Callable[[], None]
    ) -> None:
        """Run `serve` for each stream that comes through a relay.

        `changed` is called when `addresses` did.
        """
        self._context, self._tasks = context, tasks
        self._serve, self._changed = serve, changed
        self._held: dict[str, asyncio.Task[None]] = {}
        self._avoid_until_s: dict[str, float] = {}
        self._answering: Counter[str] = Counter()
        self._needed = self._seeking = False

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where this peer is reached through its relays."""
        known = self._context.roster.addresses
        return tuple(
            address for relay in self._held for address in self._through(known.get(relay, ()))[:1]
        )

    def _through(self, addresses: Iterable[str]) -> list[str]:
        """Return this peer's addresses through a relay with these, as far as records hold them."""
        mine = (through(address, self._context.peer_id) for address in dialled(addresses))
        return [address for address in mine if len(address) <= TEXT_MAX]

    def look(self, *, needed: bool) -> None:
        """Hear now and then whether relays are needed; does not wait."""
        self._needed = needed
        for relay, task in self._held.items():
            vanished = not self._context.roster.sees(relay)
            if vanished or not (needed or self._answering[relay]):
                task.cancel()
        if needed and not self._seeking and len(self._held) < _WANTED and self._candidates():
            self._seeking = True
            self._tasks.spawn(self._seek(), "seeking relays")

    def _candidates(self) -> list[str]:
        now_s = asyncio.get_running_loop().time()
        fit = [
            record.peer_id
            for record in self._context.roster.others
            if record.peer_id not in self._held
            and not circuits_to(record.peer_id, record.addresses)
            and self._through(record.addresses)
            and self._avoid_until_s.get(record.peer_id, 0.0) <= now_s
        ]
        return sorted(fit, key=self._rank)

    def _rank(self, peer_id: str) -> bytes:
        pair = f"{self._context.peer_id} {peer_id}"
        return hashlib.blake2b(pair.encode(), digest_size=8).digest()

    async def _seek(self) -> None:
        try:
            for relay in self._candidates():
                if not self._needed or len(self._held) >= _WANTED:
                    return
                try:
                    channel = await self._ask(relay)
                except (LinkLost, BadMessage) as error:
                    _log.debug("peer %s is no relay: %s", relay[-8:], error)
                    now_s = asyncio.get_running_loop().time()
                    self._avoid_until_s[relay] = now_s + _AVOID_S
                    continue
                task = self._tasks.spawn(self._listen(relay, channel), f"relay {relay[-8:]}")
                task.add_done_callback(partial(self._gone, relay, channel))
                self._held[relay] = task
                _log.info("others reach this peer through %s", relay[-8:])
                self._changed()
        finally:
            self._seeking = False

    async def _ask(self, relay: str) -> Channel:
        channel = await self._context.open(relay)
        try:
            await self._context.ask(channel, HoldOn(), Holding)
        except BaseException:
            channel.close()
            raise
        return channel

    async def _listen(self, relay: str, channel: Channel) -> None:
        try:
            while True:
                call = await channel.receive(Call, _CALL_S)
                if self._answering[relay] < _CALLS_EACH:
                    self._answering[relay] += 1
                    self._tasks.spawn(self._answer(relay, call), f"call by {relay[-8:]}")
        except (LinkLost, BadMessage) as error:
            _log.info("relay %s is lost: %s", relay[-8:], error)
            now_s = asyncio.get_running_loop().time()
            self._avoid_until_s[relay] = now_s + _AVOID_S

    def _gone(self, relay: str, channel: Channel, task: asyncio.Task[None]) -> None:
        channel.close()
        del self._held[relay]
        self._changed()
        if not task.cancelled():
            self.look(needed=self._needed)

    async def _answer(self, relay: str, call: Call) -> None:
        """Open the stream that a relay asks for, and serve what comes over it."""
        try:
            channel = await self._context.open(relay, bulk=call.bulk)
            try:
                await channel.send(TakeCall(ticket=call.ticket))
                if call.caller != relay:
                    channel.pacer = Pacer()  # what goes through it is limited once
                    identity = self._context.transport.identity
                    channel = await agree_as_called(channel, identity, call.caller)
            except BaseException:
                channel.close()
                raise
            await self._serve(channel)
        except (LinkLost, BadMessage) as error:
            _log.debug("a call by %s came to nothing: %s", relay[-8:], error)
        finally:
            self._answering[relay] -= 1
            self._answering += Counter()  # forgets relays without calls
