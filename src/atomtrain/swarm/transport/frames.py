"""What encrypted streams have in common: frames, whatever carries them.

    length of what follows (4 bytes, big endian) | ciphertext | tag (16 bytes)

A frame goes through AES-256-GCM from where it lies to the buffer it is sent from, and back to where
it belongs. The nonce counts the frames of a direction; each direction of each stream has a key of
its own, so none is ever used twice. Frames that are lost, repeated, moved or changed do not
decrypt, and end the stream.
"""

from __future__ import annotations

import asyncio
import struct
from abc import abstractmethod
from typing import NamedTuple, cast

from atomtrain.swarm.transport.transport import CHUNK_BYTES, Channel

_LENGTH = struct.Struct(">I")
_TAG_BYTES = 16
_NONCE_BYTES = 12
_BUFFER_BYTES = _LENGTH.size + CHUNK_BYTES + _TAG_BYTES + _LENGTH.size
"""Of a frame, and the length of the next one."""
_SPARE_BUFFERS = 16
"""Kept when nobody uses them."""


class Keys(NamedTuple):
    """The keys of a stream at one of its ends, 32 bytes each."""

    send: bytes
    receive: bytes


class _Buffers:
    """Buffers of a frame each; who needs one gets the one that was used last.

    It is in the processor's cache still, where a stream's own would be gone when its turn comes.
    """

    def __init__(self) -> None:
        self._spare: list[bytearray] = []  # changed by atomic operations only

    def take(self) -> memoryview:
        """Return a buffer with undefined bytes."""
        try:
            return memoryview(self._spare.pop())
        except IndexError:
            return memoryview(bytearray(_BUFFER_BYTES))

    def give_back(self, view: memoryview) -> None:
        """Take a buffer, or a part that stands for it, which nobody uses any more."""
        if len(self._spare) < _SPARE_BUFFERS:
            self._spare.append(cast("bytearray", view.obj))


_BUFFERS = _Buffers()


class FrameChannel(Channel):
    """One encrypted stream to one peer, on which both ends have agreed on keys."""

    def __init__(self, remote: str, stall_s: float, keys: Keys) -> None:
        """Begin to count the frames of both directions."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        super().__init__(remote, stall_s)
        self._sealing, self._opening = AESGCM(keys.send), AESGCM(keys.receive)
        self._sent_frames = self._received_frames = 0
        self._in: memoryview | None = None
        """What came of a frame that is not whole yet is in the first `_filled` bytes."""
        self._filled = 0
        self._ahead = b""
        self._rest = memoryview(b"")

    @abstractmethod
    async def _receive(self, view: memoryview, wanted_bytes: int) -> int:
        """Wait for bytes of a frame, write them to `view`; return how many, 0 at the end.

        `wanted_bytes` are missing. Raises `OSError`.
        """

    def _at_once(self, view: memoryview) -> int | None:
        """Do what `_receive` does if nothing has to be waited for; None if something has."""
        return None

    def _turn_is_over(self, moved_bytes: int) -> bool:
        """Hear that a frame of so many bytes came whole; say whether others have their turn."""
        return False

    def _sealed(self, view: memoryview) -> memoryview:
        """Return the frame of `view`, `CHUNK_BYTES` at most; to be given to `_unused` once sent."""
        frame = _BUFFERS.take()[: _LENGTH.size + len(view) + _TAG_BYTES]
        _LENGTH.pack_into(frame, 0, len(view) + _TAG_BYTES)
        nonce = self._sent_frames.to_bytes(_NONCE_BYTES, "big")
        self._sent_frames += 1
        self._sealing.encrypt_into(nonce, view, None, frame[_LENGTH.size :])
        return frame

    def _unused(self, frame: memoryview) -> None:
        """Take back the memory of a frame."""
        _BUFFERS.give_back(frame)

    async def _read_into(self, view: memoryview) -> int:
        from cryptography.exceptions import InvalidTag

        if not self._rest:
            frame = await self._frame()
            if not frame:
                return 0
            count = len(frame) - _TAG_BYTES
            plain = view[:count] if count <= len(view) else memoryview(bytearray(count))
            nonce = self._received_frames.to_bytes(_NONCE_BYTES, "big")
            self._received_frames += 1
            try:
                self._opening.decrypt_into(nonce, frame, None, plain)
            except InvalidTag:
                raise OSError("what arrived was not sent by this peer") from None
            self._next_frame(_LENGTH.size + len(frame))
            if count <= len(view):
                if self._turn_is_over(count):
                    await asyncio.sleep(0)
                return count
            self._rest = plain
        count = min(len(view), len(self._rest))
        view[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    async def _frame(self) -> memoryview:
        """Return the next frame, in the buffer behind its length; empty at the stream's end.

        Who gives up waiting may wait again: what has come is kept.
        """
        if self._in is None:
            self._in, self._filled = _BUFFERS.take(), len(self._ahead)
            self._in[: self._filled] = self._ahead
        wanted = _LENGTH.size
        while True:
            while self._filled < wanted:
                # At most the next frame's length is read ahead.
                view = self._in[self._filled : wanted + _LENGTH.size]
                count = self._at_once(view)
                if count is None:
                    count = await self._receive(view, wanted - self._filled)
                if not count:
                    return memoryview(b"")
                self._filled += count
                self._came(count)
            if wanted > _LENGTH.size:
                return self._in[_LENGTH.size : wanted]
            (length,) = _LENGTH.unpack_from(self._in)
            if not _TAG_BYTES < length <= CHUNK_BYTES + _TAG_BYTES:
                raise OSError(f"a frame of {length} bytes")
            wanted += length

    def _next_frame(self, read_bytes: int) -> None:
        """Go on behind a frame that was read; at most the next one's length came with it."""
        assert self._in is not None
        self._ahead = bytes(self._in[read_bytes : self._filled])
        _BUFFERS.give_back(self._in)
        self._in = None
