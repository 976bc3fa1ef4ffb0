"""Anchors on their way to peers that fetch them, and how much of them one peer can have kept here.

What is being sent stays in memory until it has gone, also when rounds have made others since: a
peer that fetches over a slow link would never end otherwise. Who asks for an anchor again and
again, and takes nothing, must not have all versions kept. So a peer is sent one anchor of each
fragment at a time; who asks anew has lost the last stream, and that one ends. Eight fragments at
once, at most.
"""

from __future__ import annotations

import asyncio

from atomtrain.swarm.anchors.anchors import Anchor
from atomtrain.swarm.catchup.fetching import send_anchor
from atomtrain.swarm.transport.messages import AskAnchor, BadMessage
from atomtrain.swarm.transport.transport import Channel

_EACH = 8
"""Who fetches asks one peer for seven at most."""


class Donations:
    """Sends anchors; on one event loop."""

    def __init__(self) -> None:
        """Send none yet."""
        self._going: dict[str, dict[int, asyncio.Timeout]] = {}
        """By peer and fragment: what ends the sending."""

    async def send(self, channel: Channel, ask: AskAnchor, anchor: Anchor) -> None:
        """Answer `AskAnchor`.

        Raises:
            BadMessage: as many are on their way to this peer as may be.
            TimeoutError: the peer has asked for this fragment again, over another stream.
            LinkLost: the stream is lost.
        """
        to = self._going.setdefault(channel.remote, {})
        if (last := to.pop(ask.fragment, None)) is not None:
            last.reschedule(asyncio.get_running_loop().time())
        elif len(to) >= _EACH:
            raise BadMessage("as many anchors are on their way as may be")
        try:
            async with asyncio.timeout(None) as going:
                to[ask.fragment] = going
                await send_anchor(channel, ask, anchor)
        finally:
            if to.get(ask.fragment) is going:
                del to[ask.fragment]
            if not to and self._going.get(channel.remote) is to:
                del self._going[channel.remote]
