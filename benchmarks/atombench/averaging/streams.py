"""What a round's encrypted streams take by themselves: the same bytes, and nothing computed."""

from __future__ import annotations

import asyncio

from atombench.averaging.mesh import Mesh
from atomtrain.swarm.rounds.exchange import together
from atomtrain.swarm.transport.frames import Keys
from atomtrain.swarm.transport.secure import SecureChannel

_KEY = bytes(32)
"""Of all streams, both ways: nothing that is secret goes over them."""
_STALL_S = 60.0
_PHASES = ("contributions", "means")


class EncryptedMesh(Mesh):
    """A mesh whose bytes go through the channels that rounds use, from memory to memory."""

    def __init__(self, rank: int, address: str) -> None:
        """Listen on a free port of `address`."""
        super().__init__(rank, address)
        self._there = self._back = memoryview(b"")

    def exchange(self, moved_bytes: int) -> None:
        """Send and receive so much: contributions, and then as much again, as means are."""
        each = -(-moved_bytes // (2 * len(self._streams)))
        if len(self._there) != each * len(self._streams):
            self._there = memoryview(bytearray(each * len(self._streams)))
            self._back = memoryview(bytearray(each * len(self._streams)))
        asyncio.run(self._exchange(each))

    async def _exchange(self, each: int) -> None:
        work = []
        for index, stream in enumerate(self._streams):
            stream.setblocking(False)
            # A new one each time, as rounds have: it counts frames, and how fast bytes come.
            channel = SecureChannel("a peer", stream, Keys(_KEY, _KEY), _STALL_S)
            part = slice(index * each, (index + 1) * each)
            work += [_send(channel, self._there[part]), _receive(channel, self._back[part])]
        await together(*work)


async def _send(channel: SecureChannel, data: memoryview) -> None:
    for _ in _PHASES:
        await channel.send_bytes(data)


async def _receive(channel: SecureChannel, place: memoryview) -> None:
    for _ in _PHASES:
        await channel.receive_into(place)
