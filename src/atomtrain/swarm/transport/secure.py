"""A channel over a TCP socket that the event loop drives itself, encrypted in large frames.

TLS cuts everything into records of 16 KiB, and asyncio copies each byte several times more; that
costs four times what the cipher does. Here a frame (`frames`) holds up to 256 KiB, and goes from
where it lies to the socket's buffer and back to where it belongs.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

from atomtrain.swarm.transport.frames import FrameChannel, Keys
from atomtrain.swarm.transport.transport import CHUNK_BYTES

_KEY_BYTES = 32
_AT_ONCE_BYTES = 1 << 20
"""What moves without a wait before others on the event loop have their turn."""
_WAKE_S = 0.05
_WAKE_BYTES_MAX = CHUNK_BYTES
PUBLIC_BYTES = 32
"""Bytes of a public key of `agree`."""


class Agreement:
    """One end of an X25519 key agreement that a secret known to both ends authenticates."""

    def __init__(self) -> None:
        """Draw a new private key, for one stream."""
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()

    def keys(self, secret: bytes, other: bytes, *, opened: bool) -> Keys:
        """Return the stream's keys by HKDF (RFC 5869) from what was agreed and the secret.

        Who does not know the secret gets others, and so nothing that decrypts.

        Args:
            secret: What both ends know.
            other: The other end's public key.
            opened: Whether this end opened the stream.

        Raises:
            OSError: `other` is not a usable key.
        """
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(other))
        except ValueError as error:
            raise OSError(f"no key can be agreed: {error}") from error
        ends = (self.public, other) if opened else (other, self.public)
        info = b"atomtrain straight stream 1" + b"".join(ends)
        derived = HKDF(SHA256(), 2 * _KEY_BYTES, salt=secret, info=info).derive(shared + secret)
        there, back = derived[:_KEY_BYTES], derived[_KEY_BYTES:]
        return Keys(there, back) if opened else Keys(back, there)


class SecureChannel(FrameChannel):
    """One stream to one peer over TCP, encrypted."""

    def __init__(
        self,
        remote: str,
        plain: socket.socket,
        keys: Keys,
        stall_s: float,
        before_close: Callable[[socket.socket, str], None] = lambda plain, remote: None,
    ) -> None:
        """Wrap a connected non-blocking socket, on the loop that will drive it.

        `before_close` is called once with the socket, still open, and `remote`.
        """
        super().__init__(remote, stall_s, keys)
        self._socket = plain
        self._descriptor = plain.fileno()  # selectors take numbers faster than sockets
        self._before_close = before_close
        self._loop = asyncio.get_running_loop()
        self._waiting: set[asyncio.Future[None]] = set()
        self._closed = False
        self._opened_s = self._loop.time()
        self._arrived_bytes = 0
        self._least_bytes = 1
        self._at_once_bytes = 0

    def close(self) -> None:
        """Close the stream; idempotent, does not block. Whoever waits here gets an error."""
        if self._closed:
            return
        self._closed = True
        self._before_close(self._socket, self.remote)
        if not self._loop.is_closed():
            self._loop.remove_reader(self._descriptor)
            self._loop.remove_writer(self._descriptor)
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(ConnectionResetError("closed at this end"))
        with contextlib.suppress(OSError):
            self._socket.close()

    async def _write(self, view: memoryview) -> None:
        if not len(view):
            return
        frame, sent = self._sealed(view), 0
        try:
            while True:
                self._check_open()
                try:
                    sent += self._socket.send(frame[sent:])
                except BlockingIOError:
                    await self._wait(self._loop.add_writer, self._loop.remove_writer)
                    continue
                if sent == len(frame):
                    break
                self._went()
        except BaseException:
            self.close()  # half a frame is out: nothing after it could be read
            raise
        self._unused(frame)
        if self._turn_is_over(len(view)):
            await asyncio.sleep(0)

    def _at_once(self, view: memoryview) -> int | None:
        self._check_open()
        try:
            count = self._socket.recv_into(view)
        except BlockingIOError:
            return None
        self._arrived_bytes += count
        return count

    async def _receive(self, view: memoryview, wanted_bytes: int) -> int:
        while (count := self._at_once(view)) is None:
            self._wake_at(wanted_bytes)
            await self._wait(self._loop.add_reader, self._loop.remove_reader)
        return count

    def _turn_is_over(self, moved_bytes: int) -> bool:
        """Give others their turn after a few whole frames, if the peer is so fast."""
        self._at_once_bytes += moved_bytes
        if moved_bytes == CHUNK_BYTES and self._at_once_bytes < _AT_ONCE_BYTES:
            return False
        self._at_once_bytes = 0
        return True

    def _wake_at(self, wanted_bytes: int) -> None:
        """Have the socket count as readable when there is enough, or the stream ends.

        A link brings a frame in a hundred parts; waking up for each costs more than all the rest.
        Enough is what has come in `_WAKE_S` on average: nothing that moves seems to have stalled.
        """
        open_s = self._loop.time() - self._opened_s
        usual_bytes = int(self._arrived_bytes * _WAKE_S / open_s) if open_s > 0 else 1
        enough = max(1, min(wanted_bytes, usual_bytes, _WAKE_BYTES_MAX))
        least_bytes = 1 << (enough.bit_length() - 1)  # few values: each change is a system call
        if least_bytes != self._least_bytes:
            self._least_bytes = least_bytes
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least_bytes)

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectionResetError("closed at this end")

    async def _wait(self, watch: Callable[..., object], forget: Callable[[int], object]) -> None:
        ready = self._loop.create_future()
        self._waiting.add(ready)
        watch(self._descriptor, _resolve, ready)
        self._at_once_bytes = 0
        try:
            await ready
        finally:
            self._waiting.discard(ready)
            if not self._closed:  # then the descriptor may be another socket's already
                forget(self._descriptor)


def _resolve(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
