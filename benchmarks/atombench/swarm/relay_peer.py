"""A peer of `atom bench relay`: a member of a swarm that fetches state from whom it is told."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from atombench.swarm.join_peer import JoinPeer, Reply
from atomtrain.swarm.transport.messages import Ping, Pong
from atomtrain.swarm.transport.sealed import SealedChannel

_OPEN_S = 30.0
_FETCH_S = 300.0


class RelayPeer(JoinPeer):
    """What the benchmark tells a peer to do."""

    def commands(self) -> Mapping[str, Callable[..., Reply]]:
        """Return what it can be told, by name."""
        return {**super().commands(), "members": self.members, "open": self.open,
                "fetch": self.fetch, "passed": self.passed}  # fmt: skip

    def members(self) -> Reply:
        """Return this peer's id, and by member through how many relays it is reached."""
        assert self._swarm is not None
        relays = {peer.peer_id: peer.relays for peer in self._swarm.peers()}
        return {"peer_id": self._swarm.peer_id, "relays": relays}

    def open(self, peer_id: str) -> Reply:
        """Open a stream to a member and have one answer; say how long, and through whom."""

        async def ask(context: Any) -> Reply:
            started_s = time.monotonic()
            channel = await context.open(peer_id)
            try:
                await channel.send(Ping(bytes_count=0))
                await channel.receive(Pong, _OPEN_S)
                through = channel.relay_id if isinstance(channel, SealedChannel) else None
                return {"open_s": time.monotonic() - started_s, "through": through}
            finally:
                channel.close()

        assert self._swarm is not None
        work = ask(self._swarm._service.context)
        return self._swarm._thread.call(work, _OPEN_S)

    def fetch(self, peer_id: str | None, fragment: int = 0) -> Reply:
        """Fetch a fragment from a member; return bytes and seconds, streams included.

        Without a member, do nothing.
        """
        if peer_id is None:
            return {}
        assert self._swarm is not None
        fetcher = self._swarm._service._repairer.fetcher
        started_s = time.monotonic()
        fetched = self._swarm._thread.call(fetcher.fetch_from(peer_id, fragment), _FETCH_S)
        return {
            "seconds": time.monotonic() - started_s,
            "bytes": fetched.anchor.values.nbytes,
        }

    def passed(self) -> Reply:
        """Return the bytes that this peer has passed on."""
        assert self._swarm is not None
        return {"passed_bytes": self._swarm._service.context.routes.relay.passed_bytes}
