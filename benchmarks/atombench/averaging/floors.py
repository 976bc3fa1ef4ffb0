"""What a network and its machines allow: the floors that rounds of averaging are compared with.

- `Mesh`: all peers send to all others at once. Plain TCP, as many streams between two peers as a
  round has and open from one time to the next: nothing is encrypted, added up, hashed or waited for
  but the bytes themselves.
- `EncryptedMesh`: what a round's encrypted streams take by themselves: the same bytes, and nothing
  computed.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from atomtrain.swarm.codecs.slices import slices_per_member, streams_per_neighbour
from atomtrain.swarm.rounds.exchange import together
from atomtrain.swarm.transport.frames import Keys
from atomtrain.swarm.transport.secure import SecureChannel

_CHUNK_BYTES = 1 << 18


class Mesh:
    """One peer's streams with all others; whoever uses it has a deadline."""

    def __init__(self, rank: int, address: str) -> None:
        """Listen on a free port of `address`."""
        self._rank = rank
        self._server = socket.create_server((address, 0), backlog=64)
        self._streams: list[socket.socket] = []
        self.port: int = self._server.getsockname()[1]

    def connect(self, addresses: Sequence[tuple[str, int]], elements: int) -> None:
        """Open the streams of rounds of so many elements; `addresses` are all peers', by rank.

        Of two peers the one of higher rank opens them.
        """
        peers = len(addresses)
        streams = 2 * streams_per_neighbour(peers, slices_per_member(elements, peers))
        for host, port in addresses[: self._rank]:
            for _ in range(streams):
                self._streams.append(socket.create_connection((host, port)))
        for _ in range(streams * (peers - 1 - self._rank)):
            self._streams.append(self._server.accept()[0])
        for stream in self._streams:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._server.close()

    def exchange(self, moved_bytes: int) -> None:
        """Send so many bytes in all at least, and receive as many; return when both are done."""
        each = -(-moved_bytes // len(self._streams))
        work: list[Callable[[socket.socket, int], None]] = [_send, _receive]
        with ThreadPoolExecutor(2 * len(self._streams)) as threads:
            running = [
                threads.submit(one, stream, each) for stream in self._streams for one in work
            ]
            for future in running:
                future.result()

    def close(self) -> None:
        """Close all streams."""
        for stream in self._streams:
            stream.close()


def _send(stream: socket.socket, count_bytes: int) -> None:
    chunk = memoryview(bytes(_CHUNK_BYTES))
    for start in range(0, count_bytes, _CHUNK_BYTES):
        stream.sendall(chunk[: count_bytes - start])


def _receive(stream: socket.socket, count_bytes: int) -> None:
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    ready = select.poll()
    ready.register(stream, select.POLLIN)
    least_bytes = 0
    while count_bytes:
        if least_bytes != min(count_bytes, _CHUNK_BYTES):
            # To wake up for each packet costs more than what is done with it. Only `poll` can wait
            # for so much: `recv` would take a part, and wait for as much again.
            least_bytes = min(count_bytes, _CHUNK_BYTES)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least_bytes)
        ready.poll()
        count = stream.recv_into(buffer[:least_bytes], 0, socket.MSG_DONTWAIT)
        if not count:
            raise ConnectionResetError("a peer closed its stream")
        count_bytes -= count


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
            work += [
                _send_sealed(channel, self._there[part]),
                _receive_sealed(channel, self._back[part]),
            ]
        await together(*work)


async def _send_sealed(channel: SecureChannel, data: memoryview) -> None:
    for _ in _PHASES:
        await channel.send_bytes(data)


async def _receive_sealed(channel: SecureChannel, place: memoryview) -> None:
    for _ in _PHASES:
        await channel.receive_into(place)
