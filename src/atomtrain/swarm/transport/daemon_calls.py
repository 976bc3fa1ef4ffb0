"""Bounds on what others ask of the hash table, by who asks and from where.

hivemind answers its calls itself, and the daemon says of one only which peer it is of. Where that
peer is connected from, the daemon is asked, at most once a second.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from atomtrain.errors import SwarmError
from atomtrain.swarm.transport.buckets import RECORDS, Buckets, record_allowances
from atomtrain.swarm.transport.transport import host_of

_LOOK_S = 1.0
_TOKEN_BYTES = 1 << 13
"""A call costs a token, and one more for each 8 KiB: a whole table may come in one."""
_NOWHERE = "no known address"
Handler = Callable[[Any, Any], Awaitable[Any]]
ListPeers = Callable[[], Awaitable[Iterable[tuple[str, tuple[str, ...]]]]]
"""Returns the peers that are connected, and their addresses."""


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
