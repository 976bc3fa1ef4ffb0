"""Anchors on their way, and the end that gives them: sent to peers that ask, as many as may be."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from atomtrain.errors import BadMessage
from atomtrain.swarm.anchors.anchors import Anchor, joined_parts
from atomtrain.swarm.codecs.codec import byte_view
from atomtrain.swarm.transport.messages import AnchorHeader, AskAnchor
from atomtrain.swarm.transport.transport import Channel

_PIECE_BYTES = 1 << 20
_EACH = 8
"""Who fetches asks one peer for seven at most."""


@dataclass
class Partial:
    """What has come of an anchor so far."""

    header: AnchorHeader
    values: torch.Tensor
    velocity: torch.Tensor | None
    filled_bytes: int = 0

    def missing(self) -> Iterator[memoryview]:
        """Yield the pieces that are still to come; whoever fills one counts it."""
        begin = 0
        for tensor in (self.values, self.velocity):
            if tensor is None:
                continue
            view = byte_view(tensor)
            for start in range(0, len(view), _PIECE_BYTES):
                piece = view[start : start + _PIECE_BYTES]
                if begin + start >= self.filled_bytes:
                    yield piece
            begin += len(view)


async def send_anchor(channel: Channel, ask: AskAnchor, anchor: Anchor) -> None:
    """Answer `AskAnchor`."""
    resumes = ask.digest == anchor.stamp.digest
    parts = joined_parts(anchor.origin.parts)
    members = sorted(frozenset().union(*(part.contributors for part in parts)))
    header = AnchorHeader(
        fragment=ask.fragment,
        version=anchor.stamp.version,
        tokens=anchor.stamp.tokens,
        digest=anchor.stamp.digest,
        start_bytes=ask.start_bytes if resumes else 0,
        grouped=anchor.grouped,
        round_id=anchor.origin.round_id,
        members=tuple(members),
        starts=tuple(part.span.start for part in parts),
        stops=tuple(part.span.stop for part in parts),
        contributors=tuple(
            " ".join(str(i) for i, m in enumerate(members) if m in part.contributors)
            for part in parts
        ),
        certificate=anchor.certificate,
    )
    await channel.send(header)
    whole = Partial(header, anchor.values, anchor.velocity, header.start_bytes)
    for piece in whole.missing():
        await channel.send_bytes(piece)


class Donations:
    """Sends anchors, and bounds how much of them one peer can have kept here; on one event loop.

    What is being sent stays in memory until it has gone, also when rounds have made others since: a
    peer that fetches over a slow link would never end otherwise. Who asks for an anchor again and
    again, and takes nothing, must not have all versions kept. So a peer is sent one anchor of each
    fragment at a time; who asks anew has lost the last stream, and that one ends. Eight fragments
    at once, at most.
    """

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
