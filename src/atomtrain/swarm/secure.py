"""A channel over a TCP socket that the event loop drives itself, encrypted in large frames.

TLS cuts everything into records of 16 KiB, and asyncio copies each byte several times more; that
costs four times what the cipher does. Here a frame holds up to 256 KiB, goes through AES-256-GCM
from where it lies to the socket's buffer, and back to where it belongs:

    length of what follows (4 bytes, big endian) | ciphertext | tag (16 bytes)

The nonce counts the frames of a direction; each direction of each stream has a key of its own
(`agree`), so none is ever used twice. Frames that are lost, repeated, moved or changed do not
decrypt, and end the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from typing import NamedTuple

from atomtrain.swarm.transport import CHUNK_BYTES, Channel

_LENGTH = struct.Struct(">I")
_TAG_BYTES = 16
_KEY_BYTES = 32
_FRAME_BYTES_MAX = _LENGTH.size + CHUNK_BYTES + _TAG_BYTES
_AT_ONCE_BYTES = 1 << 20
"""What moves without a wait before others on the event loop have their turn."""
_WAKE_S = 0.02
_WAKE_BYTES_MAX = 1 << 16
PUBLIC_BYTES = 32
"""Bytes of a public key of `agree`."""


class Keys(NamedTuple):
    """The keys of a stream at one of its ends."""

    send: bytes
    receive: bytes


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
            OSError: `other` is no usable key.
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


class SecureChannel(Channel):
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
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        super().__init__(remote, stall_s)
        self._socket = plain
        self._before_close = before_close
        self._loop = asyncio.get_running_loop()
        self._waiting: set[asyncio.Future[None]] = set()
        self._closed = False
        self._sealing, self._opening = AESGCM(keys.send), AESGCM(keys.receive)
        self._sent_frames = self._received_frames = 0
        self._out = memoryview(bytearray(_FRAME_BYTES_MAX))
        self._in = memoryview(bytearray(_FRAME_BYTES_MAX + _LENGTH.size))
        self._start = self._stop = 0
        self._opened_s = self._loop.time()
        self._arrived_bytes = 0
        self._least_bytes = 1
        self._at_once_bytes = 0
        self._rest = memoryview(b"")

    def close(self) -> None:
        """Close the stream; idempotent, does not block. Whoever waits here gets an error."""
        if self._closed:
            return
        self._closed = True
        self._before_close(self._socket, self.remote)
        if not self._loop.is_closed():
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(ConnectionResetError("closed at this end"))
        with contextlib.suppress(OSError):
            self._socket.close()

    async def _write(self, view: memoryview) -> None:
        if not len(view):
            return
        frame = self._out[: _LENGTH.size + len(view) + _TAG_BYTES]
        _LENGTH.pack_into(frame, 0, len(view) + _TAG_BYTES)
        nonce = self._sent_frames.to_bytes(12, "big")
        self._sent_frames += 1
        self._sealing.encrypt_into(nonce, view, None, frame[_LENGTH.size :])
        sent = 0
        try:
            while sent < len(frame):
                self._check_open()
                try:
                    sent += self._socket.send(frame[sent:])
                    self._went()
                except BlockingIOError:
                    await self._wait(self._loop.add_writer, self._loop.remove_writer)
        except BaseException:
            self.close()  # half a frame is out: nothing after it could be read
            raise
        await self._give_way(len(view))

    async def _read_into(self, view: memoryview) -> int:
        from cryptography.exceptions import InvalidTag

        if not self._rest:
            frame = await self._frame()
            if not frame:
                return 0
            count = len(frame) - _TAG_BYTES
            plain = view[:count] if count <= len(view) else memoryview(bytearray(count))
            nonce = self._received_frames.to_bytes(12, "big")
            self._received_frames += 1
            try:
                self._opening.decrypt_into(nonce, frame, None, plain)
            except InvalidTag:
                raise OSError("what arrived was not sent by this peer") from None
            if count <= len(view):
                await self._give_way(count)
                return count
            self._rest = plain
        count = min(len(view), len(self._rest))
        view[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    async def _frame(self) -> memoryview:
        """Return the next frame, valid until the next call; empty at the end of the stream."""
        if not await self._gather(_LENGTH.size):
            return memoryview(b"")
        (length,) = _LENGTH.unpack_from(self._in, self._start)
        if not _TAG_BYTES < length <= CHUNK_BYTES + _TAG_BYTES:
            raise OSError(f"a frame of {length} bytes")
        if not await self._gather(_LENGTH.size + length):
            return memoryview(b"")
        first = self._start + _LENGTH.size
        self._start = first + length
        return self._in[first : self._start]

    async def _gather(self, wanted: int) -> bool:
        """Read until `wanted` bytes are there; says False if the stream ends before."""
        if self._start + wanted > len(self._in):  # only the beginning of a frame is ever moved
            left = bytes(self._in[self._start : self._stop])
            self._in[: len(left)] = left
            self._start, self._stop = 0, len(left)
        while self._stop - self._start < wanted:
            self._check_open()
            # At most the next frame's length is read ahead.
            until = min(self._start + wanted + _LENGTH.size, len(self._in))
            try:
                count = self._socket.recv_into(self._in[self._stop : until])
            except BlockingIOError:
                self._wake_at(wanted - (self._stop - self._start))
                await self._wait(self._loop.add_reader, self._loop.remove_reader)
                continue
            if not count:
                return False
            self._stop += count
            self._arrived_bytes += count
            self._came()
        return True

    async def _give_way(self, moved_bytes: int) -> None:
        """Let others have their turn, after a few whole frames if the peer is so fast."""
        self._at_once_bytes += moved_bytes
        if moved_bytes < CHUNK_BYTES or self._at_once_bytes >= _AT_ONCE_BYTES:
            self._at_once_bytes = 0
            await asyncio.sleep(0)

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

    async def _wait(
        self, watch: Callable[..., object], forget: Callable[[socket.socket], object]
    ) -> None:
        ready = self._loop.create_future()
        self._waiting.add(ready)
        watch(self._socket, _resolve, ready)
        self._at_once_bytes = 0
        try:
            await ready
        finally:
            self._waiting.discard(ready)
            if not self._closed:  # then the descriptor may be another socket's already
                forget(self._socket)


def _resolve(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
