"""Token buckets: how often a peer, and all peers at one address, may ask for something.

A bucket holds `burst` tokens and gains `per_s` a second; a request takes one. Where there is none
the request is refused at once: nothing waits. An address has 16 times what a peer has, so made-up
identities on one machine do not help. Who is passed on by a relay has the relay for an address.

What an honest peer asks of one other at most, in a swarm of 64 with F fragments and a round every
2 s: at once, when it comes or comes back, and then in each second.

    streams      2 F + 40, then 2    what follows, a proposal a round, and a refused one a second;
                                     or how a newcomer makes sure of each fragment
    anchors      2 F, then 0.5       all when it comes, each cut off once; later one a round
    pings        30, then 0          a look from outside
    probes       2, then 0.1         silence is asked about again after 10 s
    accusations  21, then 0          one for each liar; they are less than a third
    calls        90, then 45         a relay passes on 5 lanes and a call to each of 15 members
    records      40, then 8          8 calls of the hash table a beat, of which 2.8 were seen among
                                     five peers; a beat takes `expiry_s`/30 at least

To these streams come questions for certificates, of what a peer claims that nothing certifies: four
for each fragment, as many again for what others signed, 16 in a beat. 8 F are enough for them.

Streams that rounds have called for take nothing: lanes of a round under way, invitations that are
followed, proposals that are accepted, and streams through relays, which `calls` counts. So there is
no pace of rounds that meets a limit. All that `allowances` gives is at least four times what the
table says; 64 peers at one address ask 64 times as much, and 16 times four is allowed. Pings are
asked for by people, three times in a row.

hivemind answers calls of the hash table itself, and the daemon says of one only which peer it is
of. Where that peer is connected from, the daemon is asked, at most once a second.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, NamedTuple

from atomtrain.errors import SwarmError
from atomtrain.swarm.transport.messages import (
    Accuse,
    AskAnchor,
    AskDial,
    Message,
    Ping,
    RelayTo,
    TakeCall,
)
from atomtrain.swarm.transport.transport import Channel, host_of

_log = logging.getLogger("atomtrain.swarm")
STREAMS, ANCHORS, PINGS = "streams", "anchors", "pings"
PROBES, ACCUSATIONS, CALLS, RECORDS = "probes", "accusations", "calls", "records"
NEW_BYTES = "bytes of new records"
HOST_TIMES = 16
"""So many times what one peer may have, all at one address may."""
_MOST = 16384
"""Buckets of peers, and as many of addresses, 200 bytes each. The one that was used longest ago
goes first. Who has it asks of a full one then: so does anybody with a new identity."""
_TOLD_AGAIN_S = 60.0
_TOLD_MOST = 64
"""Lines a minute: identities cost nothing."""
_KINDS: dict[type[Message], str] = {
    AskAnchor: ANCHORS, Ping: PINGS, AskDial: PROBES, Accuse: ACCUSATIONS, RelayTo: CALLS,
    TakeCall: CALLS,
}  # fmt: skip
"""All others count as the streams that they come on."""
REFUSAL = "it was asked for that too often; try again in a minute"
_LOOK_S = 1.0
_TOKEN_BYTES = 1 << 13
"""A call costs a token, and one more for each 8 KiB: a whole table may come in one."""
_NOWHERE = "no known address"
Handler = Callable[[Any, Any], Awaitable[Any]]
ListPeers = Callable[[], Awaitable[Iterable[tuple[str, tuple[str, ...]]]]]
"""Returns the peers that are connected, and their addresses."""


class Allowance(NamedTuple):
    """What one peer may ask for."""

    burst: float
    """At once."""
    per_s: float
    """Later, in each second."""


def allowances(fragments: int) -> dict[str, Allowance]:
    """Return what a peer of a run with so many fragments may ask another one for."""
    anchors = 64.0 + 8 * fragments
    return {
        STREAMS: Allowance(320.0 + 8 * fragments, 8.0),
        ANCHORS: Allowance(anchors, anchors / 30),
        PINGS: Allowance(96.0, 1.0),
        PROBES: Allowance(8.0, 0.4),
        ACCUSATIONS: Allowance(96.0, 0.2),
        CALLS: Allowance(1024.0, 200.0),
    }


def record_allowances(expiry_s: float) -> dict[str, Allowance]:
    """Return what a peer may do with the hash table, where records live so long.

    Of what it holds of peers that were not there yet, all together, an address' part: 4 MiB at
    once, which are those of 2,000 peers, and 64 KiB a second.
    """
    return {
        RECORDS: Allowance(512.0, 960.0 / expiry_s),
        NEW_BYTES: Allowance(float(1 << 18), float(1 << 12)),
    }


class _Bucket:
    """Tokens, and when they were counted."""

    __slots__ = ("at_s", "tokens")

    def __init__(self, tokens: float, at_s: float) -> None:
        self.tokens, self.at_s = tokens, at_s


class Buckets:
    """The buckets of all peers and addresses; for one thread."""

    def __init__(
        self, allowed: Mapping[str, Allowance], clock: Callable[[], float], most: int = _MOST
    ) -> None:
        """Have all buckets full. `clock` returns seconds that only grow.

        `most`: buckets of peers that are remembered, and as many of addresses.
        """
        self._allowed, self._clock, self._most = allowed, clock, most
        self._peers: OrderedDict[tuple[str, str], _Bucket] = OrderedDict()
        self._hosts: OrderedDict[tuple[str, str], _Bucket] = OrderedDict()
        self._told: OrderedDict[str, float] = OrderedDict()

    def take(self, kind: str, peer_id: str, host: str = "", cost: float = 1.0) -> bool:
        """Take what a request of a peer at an address costs; False: it is to be refused.

        Then nothing is taken, and the log is told, once a minute for each peer. An empty id or
        address is not counted.
        """
        buckets = self._of(kind, peer_id, host)
        if any(bucket.tokens < cost for bucket in buckets):
            self._tell(kind, peer_id, host)
            return False
        for bucket in buckets:
            bucket.tokens -= cost
        return True

    def give_back(self, kind: str, peer_id: str, host: str = "", cost: float = 1.0) -> None:
        """Put back what was taken for a request that was called for."""
        for bucket in self._of(kind, peer_id, host):
            bucket.tokens += cost

    def _of(self, kind: str, peer_id: str, host: str) -> list[_Bucket]:
        burst, per_s = self._allowed[kind]
        found = []
        if peer_id:
            found.append(self._filled(self._peers, (kind, peer_id), burst, per_s))
        if host:
            times = HOST_TIMES
            found.append(self._filled(self._hosts, (kind, host), times * burst, times * per_s))
        return found

    def _filled(
        self, table: OrderedDict[tuple[str, str], _Bucket], key: tuple[str, str], burst: float,
        per_s: float,
    ) -> _Bucket:  # fmt: skip
        now_s = self._clock()
        bucket = table.get(key)
        if bucket is None:
            bucket = table[key] = _Bucket(burst, now_s)
            if len(table) > self._most:
                table.popitem(last=False)
        table.move_to_end(key)
        bucket.tokens = min(burst, bucket.tokens + per_s * (now_s - bucket.at_s))
        bucket.at_s = now_s
        return bucket

    def _tell(self, kind: str, peer_id: str, host: str) -> None:
        now_s, who = self._clock(), peer_id or host
        while self._told and next(iter(self._told.values())) <= now_s - _TOLD_AGAIN_S:
            self._told.popitem(last=False)
        if who in self._told or len(self._told) >= _TOLD_MOST:
            return
        self._told[who] = now_s
        place = f"peer {peer_id[-8:]}" + (f" at {host}" if host else "") if peer_id else host
        _log.warning(
            "%s of %s are more than any peer needs: refused for now", kind.capitalize(), place
        )


class Bounds:
    """Which request counts as what, and whether it is answered; on its peer's event loop."""

    def __init__(self, peer_id: str, fragments: int, clock: Callable[[], float]) -> None:
        """Of peer `peer_id`, which may ask itself whatever it likes; `clock` is in seconds."""
        self._peer_id = peer_id
        self._buckets = Buckets(allowances(fragments), clock)

    def admits_stream(self, channel: Channel) -> bool:
        """Say whether a stream is to be served that another peer has opened."""
        return self._take(STREAMS, channel)

    def refusal(self, channel: Channel, message: Message) -> str:
        """Return why what a stream begins with is not answered, or an empty string."""
        kind = _KINDS.get(type(message))
        return "" if kind is None or self._take(kind, channel) else REFUSAL

    def called_for(self, channel: Channel) -> None:
        """Hear that a stream was wanted here: it does not count."""
        if channel.remote != self._peer_id:
            self._buckets.give_back(STREAMS, channel.remote, channel.host)

    def _take(self, kind: str, channel: Channel) -> bool:
        return channel.remote == self._peer_id or self._buckets.take(
            kind, channel.remote, channel.host
        )


class DaemonCalls:
    """Counts calls of the hash table; belongs to an event loop."""

    def __init__(
        self, expiry_s: float, list_peers: ListPeers, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Records live `expiry_s`; `clock` returns seconds that only grow."""
        self._buckets = Buckets(record_allowances(expiry_s), clock)
        self._list_peers, self._clock = list_peers, clock
        self._hosts: dict[str, str] = {}
        """By peer that is connected."""
        self._looked_s = -_LOOK_S

    def bounded(self, handler: Handler) -> Handler:
        """Return a handler of a call that fails, before it does anything, where there are too many.

        Its caller gets an error for an answer.
        """

        async def answer(request: Any, context: Any) -> Any:
            peer_id = str(context.remote_id)
            host = await self._host(peer_id)
            cost = 1.0 + request.ByteSize() / _TOKEN_BYTES
            if not self._buckets.take(RECORDS, peer_id, host, cost):
                raise SwarmError("too many calls; try again later")
            return await handler(request, context)

        return answer

    async def _host(self, peer_id: str) -> str:
        now_s = self._clock()
        if peer_id not in self._hosts and now_s >= self._looked_s + _LOOK_S:
            self._looked_s = now_s
            connected = await self._list_peers()
            self._hosts = {
                peer: next(filter(None, map(host_of, places)), _NOWHERE)
                for peer, places in connected
            }
        return self._hosts.get(peer_id, _NOWHERE)
