"""Members that vanished are looked for: a network that was cut in two grows together again.

The hash table alone would not do that. Each half drops the other's nodes from its tables, and when
the network is whole again nobody there knows anybody here. So every peer now and then dials some of
those that it knew and does not see any more, and introduces their tables to each other.
"""

from __future__ import annotations

import asyncio
import logging

from atomtrain.swarm.rounds.context import Context
from atomtrain.swarm.transport.transport import LinkLost

_log = logging.getLogger("atomtrain.swarm")
_AT_ONCE = 2
_WAIT_S_MAX = 600.0


class Reunion:
    """Looks for lost peers, each first soon, then ever more seldom: at last every ten minutes."""

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
        return sorted(ripe, key=lambda peer_id: self._waits[peer_id])[:_AT_ONCE]

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
                self._waits[peer_id] = (now_s + wait_s, min(2 * wait_s, _WAIT_S_MAX))
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
