"""How a peer and the others reach each other: whether it can be dialled, relays, lost peers.

No peer can tell by itself whether others can dial it: a NAT lets everything out. So it asks some
(`Reach`). Who cannot be dialled holds on to a few members that can (`Relays`). And members that
vanished are looked for (`Reunion`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from atomtrain.errors import BadMessage
from atomtrain.swarm.membership.records import TEXT_MAX
from atomtrain.swarm.node.network_thread import Tasks
from atomtrain.swarm.rounds.context import Context
from atomtrain.swarm.transport.addresses import circuits_to, dialled, through
from atomtrain.swarm.transport.messages import AskDial, Call, Dialled, Holding, HoldOn, TakeCall
from atomtrain.swarm.transport.rates import Pacer
from atomtrain.swarm.transport.sealed import agree_as_called
from atomtrain.swarm.transport.transport import Channel, Handler, LinkLost

_log = logging.getLogger("atomtrain.swarm")
_ASKED, _ASKED_AT_ONCE = 8, 3
_AGAIN_YES_S, _AGAIN_NO_S = 300.0, 60.0
_AGAIN_SILENT_S = 10.0
_BELIEVED = 2
"""What so many say is believed, whatever others say."""
_WANTED = 3
"""Relays of one peer: one of them may die, one be out of reach for somebody."""
_AVOID_S = 10.0
_CALLS_EACH = 64
"""Calls of one relay that are answered at once."""
_CALL_S = 86_400.0
"""Without a call for so long, another relay may be as good."""
_SOUGHT_AT_ONCE = 2
_SEEK_AGAIN_S_MAX = 600.0


@dataclass(frozen=True)
class _Answer:
    answered: bool | None
    """None: the peer that was asked did not say."""
    at_s: float

    @property
    def lasts_s(self) -> float:
        if self.answered is None:
            return _AGAIN_SILENT_S
        return _AGAIN_YES_S if self.answered else _AGAIN_NO_S


class Reach:
    """Whether others can dial this peer, as they find out for it; asked by a task of the service.

    They dial its address anew. Whoever is in the same local network may get through where the rest
    does not, so few "no"s count: then the peer looks for relays. It can still be dialled by those
    that got through. But one "no" against two that say "yes" may be a lie, or trouble of its own.
    """

    def __init__(self, context: Context) -> None:
        """Know nothing yet."""
        self._context = context
        self._answers: dict[str, _Answer] = {}
        self.needs_relays = False
        """Whether this peer cannot be dialled by everybody, as far as others said."""
        self._local = context.transport.is_local

    @property
    def can_be_dialled(self) -> bool:
        """Whether somebody dialled this peer, and others did not fail to."""
        return self._local or (any(self._said()) and not self._is_hidden())

    def _said(self) -> list[bool]:
        return [a.answered for a in self._answers.values() if a.answered is not None]

    def _is_hidden(self) -> bool:
        """Say whether two could not dial this peer, or one whom no two others contradict."""
        said = self._said()
        failed, dialled = said.count(False), said.count(True)
        return failed >= _BELIEVED or (failed > 0 and dialled < _BELIEVED)

    def due(self) -> list[str]:
        """Return the peers to ask now."""
        if self._local:
            return []
        now_s = asyncio.get_running_loop().time()
        there = {record.peer_id for record in self._context.roster.others}
        self._answers = {peer: one for peer, one in self._answers.items() if peer in there}
        again = [peer for peer, one in self._answers.items() if one.at_s + one.lasts_s <= now_s]
        new = sorted(there - self._answers.keys(), key=partial(_rank, self._context.peer_id))
        return [*new[: max(0, _ASKED - len(self._answers))], *again][:_ASKED_AT_ONCE]

    async def ask(self, peer_ids: list[str]) -> None:
        """Have these peers dial this one."""
        now_s = asyncio.get_running_loop().time()
        for peer_id in peer_ids:  # nobody asks them again meanwhile
            before = self._answers.get(peer_id, _Answer(None, now_s))
            self._answers[peer_id] = _Answer(before.answered, now_s)
        for peer_id, answered in zip(
            peer_ids, await asyncio.gather(*map(self._ask, peer_ids)), strict=True
        ):
            self._answers[peer_id] = _Answer(answered, asyncio.get_running_loop().time())
        if self._said():
            self.needs_relays = self._is_hidden()

    async def _ask(self, peer_id: str) -> bool | None:
        context = self._context
        try:
            channel = await context.open(peer_id)
            try:
                await channel.send(AskDial(address=context.transport.address))
                # It dials for as long as its own measurements say, which is no longer than that.
                within_s = context.waits.answer_s(peer_id) + context.config.endpoint.connect_s
                said = await channel.receive(Dialled, within_s)
            finally:
                channel.close()
        except (LinkLost, BadMessage) as error:
            _log.debug("peer %s does not say whether it can dial: %s", peer_id[-8:], error)
            return None
        _log.debug("peer %s dialled this one: %s", peer_id[-8:], said.answered)
        return said.answered


class Relays:
    """The peers that call this one when others want it: found without a coordinator.

    Any member that can be dialled will do. Each peer prefers others in an order of its own (a
    hash), so the work is shared; it stays on a stream to a few of them, and tells everybody through
    its membership record. A relay that dies ends its stream, and the next in the order takes its
    place.
    """

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
        """Where this peer is reached through its relays; nobody is told of one on its way out."""
        if not self._needed:
            return ()
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
        changed, self._needed = needed != self._needed, needed
        if changed and self._held:
            self._changed()
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
        return sorted(fit, key=partial(_rank, self._context.peer_id))

    async def _seek(self) -> None:
        try:
            for relay in self._candidates():
                if not self._needed or len(self._held) >= _WANTED:
                    return
                try:
                    channel = await self._ask(relay)
                except (LinkLost, BadMessage) as error:
                    _log.debug("peer %s is not a relay: %s", relay[-8:], error)
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
                    channel.host = relay  # who is behind it cannot be seen
            except BaseException:
                channel.close()
                raise
            await self._serve(channel)
        except (LinkLost, BadMessage) as error:
            _log.debug("a call by %s came to nothing: %s", relay[-8:], error)
        finally:
            self._answering[relay] -= 1
            self._answering += Counter()  # forgets relays without calls


class Reunion:
    """Looks for lost peers, each first soon, then ever more seldom: at last every ten minutes.

    A network that was cut in two grows together again so; the hash table alone would not do that.
    Each half drops the other's nodes from its tables, and when the network is whole again nobody
    there knows anybody here. So every peer now and then dials some of those that it knew and does
    not see any more, and introduces their tables to each other.
    """

    def __init__(self, context: Context) -> None:
        """Prepare to look for peers that the context knows."""
        self._context = context
        self._first_wait_s = context.config.expiry_s / 2
        self._waits: dict[str, tuple[float, float]] = {}
        """By peer: when it is looked for next, and how long the wait after that is."""
        self.running = False

    def missing(self) -> list[str]:
        """Return the peers that were members once, did not say goodbye, and are not seen now."""
        roster = self._context.roster
        return [
            peer_id
            for peer_id in roster.addresses
            if peer_id != self._context.peer_id and not roster.sees(peer_id)
        ]

    def due(self) -> list[str]:
        """Return those to look for now; there are few at a time."""
        now_s = asyncio.get_running_loop().time()
        missing = self.missing()
        self._waits = {
            peer_id: self._waits.get(peer_id, (now_s + self._first_wait_s, self._first_wait_s))
            for peer_id in missing
        }
        ripe = [peer_id for peer_id in missing if self._waits[peer_id][0] <= now_s]
        return sorted(ripe, key=lambda peer_id: self._waits[peer_id])[:_SOUGHT_AT_ONCE]

    async def look(self, peer_ids: list[str]) -> None:
        """Dial these peers; whoever answers is introduced."""
        self.running = True
        try:
            self._context.known.refresh()
            for peer_id, addresses in self._context.known.addresses.items():
                if peer_id != self._context.peer_id and not self._context.roster.sees(peer_id):
                    self._context.roster.addresses[peer_id] = addresses
            for peer_id in peer_ids:
                wait_s = self._waits[peer_id][1]
                now_s = asyncio.get_running_loop().time()
                self._waits[peer_id] = (now_s + wait_s, min(2 * wait_s, _SEEK_AGAIN_S_MAX))
                await self._meet(peer_id)
        finally:
            self.running = False

    async def _meet(self, peer_id: str) -> None:
        context = self._context
        try:
            channel = await context.open(peer_id)
            channel.close()
            async with asyncio.timeout(context.waits.answer_s(peer_id)):
                met = await context.directory.introduce(peer_id)
        except (LinkLost, TimeoutError, OSError) as error:
            _log.debug("looking for %s: %s", peer_id[-8:], error)
            return
        _log.info("peer %s is there again: %s", peer_id[-8:], met)


def _rank(me: str, peer_id: str) -> bytes:
    """Return what sorts the others differently at each peer: no one is asked by all."""
    return hashlib.blake2b(f"{me} {peer_id}".encode(), digest_size=8).digest()
