"""A channel over a TLS socket that the event loop drives itself.

asyncio's own TLS copies each byte several times more; here it goes from the socket to where it
belongs. One thread drives both directions, as OpenSSL demands.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable

from atomtrain.swarm.transport import Channel

_RETRY_S = 0.001


class SecureChannel(Channel):
    """One stream to one peer over TLS."""

    def __init__(self, remote: str, secure: ssl.SSLSocket, stall_s: float) -> None:
        """Wrap a non-blocking socket after its handshake, on the loop that will drive it."""
        super().__init__(remote, stall_s)
        self._secure = secure
        self._loop = asyncio.get_running_loop()
        self._waiting: set[asyncio.Future[None]] = set()
        self._closed = False

    def close(self) -> None:
        """Close the stream; idempotent, does not block. Whoever waits here gets an error."""
        if self._closed:
            return
        self._closed = True
        if not self._loop.is_closed():
            self._loop.remove_reader(self._secure)
            self._loop.remove_writer(self._secure)
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(ConnectionResetError("closed at this end"))
        with contextlib.suppress(OSError):
            self._secure.close()

    async def _write(self, view: memoryview) -> None:
        sent = 0
        while sent < len(view):
            self._check_open()
            try:
                sent += self._secure.send(view[sent:])
            except ssl.SSLWantWriteError:
                await self._wait(self._loop.add_writer, self._loop.remove_writer)
            except ssl.SSLWantReadError:
                await asyncio.sleep(_RETRY_S)
        await asyncio.sleep(0)  # others have their turn, however fast the peer reads

    async def _read_into(self, view: memoryview) -> int:
        filled = 0
        while filled < len(view):
            self._check_open()
            try:
                count = self._secure.recv_into(view[filled:])
            except ssl.SSLWantReadError:
                if filled:
                    break
                await self._wait(self._loop.add_reader, self._loop.remove_reader)
                continue
            except ssl.SSLWantWriteError:
                await asyncio.sleep(_RETRY_S)
                continue
            if not count:
                break
            filled += count
        await asyncio.sleep(0)
        return filled

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectionResetError("closed at this end")

    async def _wait(
        self, watch: Callable[..., object], forget: Callable[[ssl.SSLSocket], object]
    ) -> None:
        ready = self._loop.create_future()
        self._waiting.add(ready)
        watch(self._secure, _resolve, ready)
        try:
            await ready
        finally:
            self._waiting.discard(ready)
            if not self._closed:  # then the descriptor may be another socket's already
                forget(self._secure)


def _resolve(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


async def shake_hands(
    plain: socket.socket, context: ssl.SSLContext, *, server_side: bool
) -> ssl.SSLSocket:
    """Return TLS over a connected socket; the caller has a deadline.

    Raises:
        OSError: the other side does not speak TLS, or is gone. `plain` is closed then.
    """
    plain.setblocking(False)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    loop = asyncio.get_running_loop()
    secure = context.wrap_socket(plain, server_side=server_side, do_handshake_on_connect=False)
    try:
        while True:
            try:
                secure.do_handshake()
                return secure
            except ssl.SSLWantReadError:
                await _once(secure, loop.add_reader, loop.remove_reader)
            except ssl.SSLWantWriteError:
                await _once(secure, loop.add_writer, loop.remove_writer)
    except BaseException:
        secure.close()
        raise


async def _once(
    secure: ssl.SSLSocket,
    watch: Callable[..., object],
    forget: Callable[[ssl.SSLSocket], object],
) -> None:
    ready = asyncio.get_running_loop().create_future()
    watch(secure, _resolve, ready)
    try:
        await ready
    finally:
        forget(secure)
