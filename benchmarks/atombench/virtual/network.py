"""A transport and a directory inside one process, for whole swarms in it.

A peer that is cut off breaks all its streams at once, as the kernel does for a killed process.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache

from atomtrain.swarm.transport.identity import Identity, verify
from atomtrain.swarm.transport.memory import Pipe, no_delay, pipe_pair
from atomtrain.swarm.transport.transport import OPEN_S, Channel, Handler, LinkLost, StreamChannel

HOST = "192.0.2.1"
"""The one address of all peers."""


def unsigned(data: bytes) -> bytes:
    """Return no signature: for members whose others do not look at it."""
    return b""


def unverified(peer_id: str, data: bytes, signature: bytes) -> bool:
    """Take every signature, as `unsigned` makes them."""
    return True


class MemoryNetwork:
    """All the peers that can reach each other, and the records they share."""

    def __init__(self, delay_s: Callable[[], float] = no_delay, stall_s: float = 5.0) -> None:
        """Make an empty network whose chunks take `delay_s()` each."""
        self.delay_s = delay_s
        self.stall_s = stall_s
        self.transports: dict[str, MemoryTransport] = {}
        self._tables: dict[str, dict[str, tuple[bytes, float]]] = {}
        """By peer: the table of records that it shares with others."""
        self.hidden: set[str] | None = None
        """Peers that nobody can dial, as behind a NAT; None: all are in one place."""
        self.identities: dict[str, Identity] = {}
        """By peer: its key, where its id names one."""
        self.keys: dict[str, str] = {}
        """By peer: the id that its key has, which others know it by in a real network."""
        self._links: set[frozenset[str]] = set()
        """Pairs of peers that one of them has dialled: streams go both ways."""
        self._side: dict[str, int] = {}
        """By peer: on which side of a split it is; peers without an entry reach everybody."""

    def cut(self, peer_id: str, *, lossy: bool = False) -> None:
        """Kill a peer: its streams break, it can neither dial nor be dialled.

        What it had sent still arrives, unless the cut is `lossy`.
        """
        self._links = {link for link in self._links if peer_id not in link}
        transport = self.transports.pop(peer_id, None)
        if transport is not None:
            transport.break_all(lossy)

    def split(self, *sides: set[str]) -> None:
        """Cut the network: peers reach those of their own side only, and share records with them.

        Streams from one side to another break. `heal` makes the network whole; the records stay
        apart until somebody introduces two peers to each other.
        """
        self._side = {peer: number for number, side in enumerate(sides) for peer in side}
        for side in sides:
            for shared in {id(self.table(peer)): self.table(peer) for peer in side}.values():
                copy = dict(shared)
                for peer in side:
                    if self.table(peer) is shared:
                        self._tables[peer] = copy
        for transport in self.transports.values():
            transport.break_all(True, lambda a, b: not self.connected(a, b))

    def heal(self) -> None:
        """Make the network whole again."""
        self._side = {}

    def dial(self, caller: str, called: str) -> bool:
        """Say whether one peer gets a stream to another."""
        link = frozenset((caller, called))
        there = caller in self.transports and self.connected(caller, called)
        hidden = self.hidden is not None and called in self.hidden and caller != called
        if not there or (hidden and link not in self._links):
            return False
        self._links.add(link)
        return True

    def connected(self, one: str, other: str) -> bool:
        """Say whether two peers are on one side."""
        sides = self._side.get(one), self._side.get(other)
        return None in sides or sides[0] == sides[1]

    def table(self, peer_id: str) -> dict[str, tuple[bytes, float]]:
        """Return the records that a peer shares; a new peer shares those of any that is there."""
        if peer_id not in self._tables:
            there = (self._tables[peer] for peer in self.transports if peer in self._tables)
            self._tables[peer_id] = next(there, {})
        return self._tables[peer_id]

    def join_tables(self, one: str, other: str) -> None:
        """Have two peers, and all that share records with either, share them all."""
        kept, gone = self.table(one), self.table(other)
        if kept is gone:
            return
        for peer_id, entry in gone.items():
            if peer_id not in kept or entry[1] > kept[peer_id][1]:
                kept[peer_id] = entry
        for peer_id, table in self._tables.items():
            if table is gone:
                self._tables[peer_id] = kept


class MemoryTransport:
    """One peer's view of a `MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork, peer_id: str) -> None:
        """Attach a peer."""
        self.peer_id = peer_id
        self.address = f"memory/{peer_id}"
        self.identity = network.identities.get(peer_id) or Identity.create()
        network.keys[peer_id] = self.identity.peer_id
        self._network = network
        self._handler: Handler | None = None
        self._context = contextvars.copy_context()
        self._channels: list[tuple[Channel, Pipe]] = []
        self._tasks: set[asyncio.Future[None]] = set()
        network.transports[peer_id] = self

    @property
    def is_local(self) -> bool:
        """Whether nobody is anywhere else."""
        return self._network.hidden is None

    def verify(self, peer_id: str, data: bytes, signature: bytes) -> bool:
        """Say whether a peer has signed `data`."""
        return _verified(self._network.keys.get(peer_id, ""), data, signature)

    async def serve(self, handler: Handler) -> None:
        """Run `handler` for each incoming stream, in the context of whoever calls this."""
        self._handler = handler
        self._context = contextvars.copy_context()

    async def open(self, peer_id: str, *, bulk: bool = False, within_s: float = OPEN_S) -> Channel:
        """Return a new stream; raises `LinkLost` if either side is cut off."""
        network = self._network
        await asyncio.sleep(network.delay_s())
        remote = network.transports.get(peer_id)
        if remote is None or remote._handler is None or not network.dial(self.peer_id, peer_id):
            raise LinkLost(f"peer {peer_id[-8:]} cannot be reached")
        to_me, to_them = pipe_pair(network.delay_s)
        mine = StreamChannel(peer_id, to_me.reader, to_them, network.stall_s)
        theirs = StreamChannel(self.peer_id, to_them.reader, to_me, network.stall_s)
        theirs.host = HOST
        self._channels.append((mine, to_me))
        remote._channels.append((theirs, to_them))
        remote._spawn(theirs)
        return mine

    def learn(self, peer_id: str, addresses: Iterable[str]) -> None:
        """Nothing to remember: everybody is in the same network."""

    async def answers(self, address: str, within_s: float) -> bool:
        """Say whether a peer answers who dials this address, in time."""
        delay_s = self._network.delay_s()
        await asyncio.sleep(min(delay_s, within_s))
        if delay_s > within_s:
            return False
        peer_id = address.rpartition("/")[2]
        network = self._network
        there = peer_id in network.transports and peer_id not in (network.hidden or ())
        return there and network.connected(self.peer_id, peer_id)

    async def refused(self, addresses: Collection[str]) -> bool:
        """Say whether none of the peers at these addresses is there any more."""
        await asyncio.sleep(self._network.delay_s())
        names = [address.rpartition("/")[2] for address in addresses]
        return bool(names) and not any(name in self._network.transports for name in names)

    async def close(self) -> None:
        """Leave the network."""
        self._network.cut(self.peer_id)

    def break_all(self, lossy: bool, which: Callable[[str, str], bool] = lambda *_: True) -> None:
        """Break every stream between this peer and another for which `which` says so."""
        for channel, pipe in self._channels:
            if which(self.peer_id, channel.remote):
                if lossy:
                    _reset(pipe)
                channel.close()
        self._channels = [
            entry for entry in self._channels if not which(self.peer_id, entry[0].remote)
        ]

    async def _handle(self, channel: Channel) -> None:
        assert self._handler is not None
        await self._handler(channel)

    def _spawn(self, channel: Channel) -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._handle(channel), context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class MemoryDirectory:
    """Membership records of a `MemoryNetwork`."""

    def __init__(
        self, network: MemoryNetwork, peer_id: str, clock: Callable[[], float] | None = None
    ) -> None:
        """Attach a peer; `clock` tells the time that is the same for all, else the loop does."""
        self._network = network
        self._peer_id = peer_id
        self._clock = clock or _loop_s

    async def publish(self, record: bytes, expiry_s: float) -> None:
        """Store this peer's record, unless it is cut off."""
        if self._peer_id in self._network.transports:
            expires_s = self._clock() + expiry_s
            self._network.table(self._peer_id)[self._peer_id] = (record, expires_s)

    async def records(self) -> dict[str, bytes]:
        """Return the records that have not expired."""
        now_s = self._clock()
        table = self._network.table(self._peer_id)
        return {k: data for k, (data, end_s) in table.items() if end_s > now_s}

    async def introduce(self, peer_id: str) -> bool:
        """Share all records with another peer, if it can be reached."""
        network = self._network
        if peer_id not in network.transports or not network.connected(self._peer_id, peer_id):
            return False
        network.join_tables(self._peer_id, peer_id)
        return True


@lru_cache(maxsize=4096)
def _verified(peer_id: str, data: bytes, signature: bytes) -> bool:
    """As `verify`, once for all peers: here they are one process, and each gets what all get."""
    return verify(peer_id, data, signature)


def _loop_s() -> float:
    return asyncio.get_running_loop().time()


def _reset(pipe: Pipe) -> None:
    """End both directions of a stream at once; what is under way is lost."""
    for each in (pipe, pipe.other):
        if each is not None:
            each._closed = True
            for index in range(len(each._under_way)):
                each._under_way[index] = (_nothing, ())
            each.reader.feed_eof()


def _nothing() -> None:
    """Arrives in place of what was lost."""
