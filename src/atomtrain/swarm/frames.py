"""What encrypted streams have in common: frames, whatever carries them.

    length of what follows (4 bytes, big endian) | ciphertext | tag (16 bytes)

A frame goes through AES-256-GCM from where it lies to the buffer it is sent from, and back to where
it belongs. The nonce counts the frames of a direction; each direction of each stream has a key of
its own, so none is ever used twice. Frames that are lost, repeated, moved or changed do not
decrypt, and end the stream.
"""

from __future__ import annotations

import struct
from abc import abstractmethod
from typing import NamedTuple

from atomtrain.swarm.transport import CHUNK_BYTES, Channel

_LENGTH = struct.Struct(">I")
_TAG_BYTES = 16
_NONCE_BYTES = 12
_FRAME_BYTES_MAX = _LENGTH.size + CHUNK_BYTES + _TAG_BYTES


class Keys(NamedTuple):
    """The keys of a stream at one of its ends, 32 bytes each."""

    send: bytes
    receive: bytes


class FrameChannel(Channel):
    """One encrypted stream to one peer, on which both ends have agreed on keys."""

    def __init__(self, remote: str, stall_s: float, keys: Keys) -> None:
        """Begin to count the frames of both directions."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        super().__init__(remote, stall_s)
        self._sealing, self._opening = AESGCM(keys.send), AESGCM(keys.receive)
        self._sent_frames = self._received_frames = 0
        self._out = memoryview(bytearray(_FRAME_BYTES_MAX))
        self._in = memoryview(bytearray(_FRAME_BYTES_MAX + _LENGTH.size))
        self._start = self._stop = 0
        self._rest = memoryview(b"")

    @abstractmethod
    async def _receive(self, view: memoryview, wanted_bytes: int) -> int:
        """Wait for bytes of a frame, write them to `view`; return how many, 0 at the end.

        `wanted_bytes` are missing. Raises `OSError`.
        """

    async def _took(self, moved_bytes: int) -> None:
        """Hear that a frame of so many bytes came whole: others may have their turn."""

    def _sealed(self, view: memoryview) -> memoryview:
        """Return the frame of `view`, `CHUNK_BYTES` at most; valid until the next one."""
        frame = self._out[: _LENGTH.size + len(view) + _TAG_BYTES]
        _LENGTH.pack_into(frame, 0, len(view) + _TAG_BYTES)
        nonce = self._sent_frames.to_bytes(_NONCE_BYTES, "big")
        self._sent_frames += 1
        self._sealing.encrypt_into(nonce, view, None, frame[_LENGTH.size :])
        return frame

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
            if count <= len(view):
                await self._took(count)
                return count
            self._rest = plain
        count = min(len(view), len(self._rest))
        view[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    async def _frame(self) -> memoryview:
        """Return the next frame, valid until the next call; empty at the end of the stream."""
        if self._stop - self._start < _LENGTH.size and not await self._gather(_LENGTH.size):
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
        """Read until `wanted` bytes are there; says False if the stream ends before.

        Who gives up waiting may wait again: what has come is kept.
        """
        if self._start + wanted > len(self._in):  # only the beginning of a frame is ever moved
            left = bytes(self._in[self._start : self._stop])
            self._in[: len(left)] = left
            self._start, self._stop = 0, len(left)
        while self._stop - self._start < wanted:
            # At most the next frame's length is read ahead.
            until = min(self._start + wanted + _LENGTH.size, len(self._in))
            missing = wanted - (self._stop - self._start)
            count = await self._receive(self._in[self._stop : until], missing)
            if not count:
                return False
            self._stop += count
            self._came()
        return True
