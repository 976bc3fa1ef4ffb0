"""What a network and its machines allow when all peers send to all others at once.

Plain TCP, as many streams between two peers as a round has and open from one time to the next:
nothing is encrypted, added up, hashed or waited for but the bytes themselves.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from atomtrain.swarm.codecs.slices import slices_per_member, streams_per_neighbour

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
