"""A stream through a peer that need not be trusted: proved and encrypted from end to end.

    caller -> called   public key (32 bytes) | signature of it and both ids (64)
    called -> caller   public key (32 bytes) | signature of both keys and both ids (64)
    then frames in both directions, as of `secure`

Keys are those of an X25519 agreement; the signatures are by the keys that the peers' ids name. So
who is between can cut the stream and count its bytes, and neither read it, change it, nor stand at
one of its ends. A greeting that is repeated leads to keys that who repeats it does not have.
"""

from __future__ import annotations

import struct

from atomtrain.swarm.identity import SIGNATURE_BYTES, Identity, verify
from atomtrain.swarm.secure import PUBLIC_BYTES, Agreement, Keys
from atomtrain.swarm.transport import CHUNK_BYTES, Channel, LinkLost

_LENGTH = struct.Struct(">I")
_TAG_BYTES = 16
_NONCE_BYTES = 12
_STEP_BYTES = 1 << 14
"""Bytes of a frame that move between two signs of life: slow links take seconds for them."""
_GREETING = b"atomtrain relayed stream 1"
_SECRET = b"atomtrain relayed stream 1, keys"


async def agree_as_caller(inner: Channel, identity: Identity, called: str) -> SealedChannel:
    """Return a stream to `called` over one that leads there.

    Raises:
        LinkLost: it does not lead there, or somebody else answers.
    """
    mine = Agreement()
    hello = _signed(identity.peer_id, called, mine.public)
    await inner.send_bytes(mine.public + identity.sign(hello))
    other, signature = await _greeting(inner)
    if not verify(called, _signed(identity.peer_id, called, mine.public, other), signature):
        raise LinkLost(f"what answers through peer {inner.remote[-8:]} is not {called[-8:]}")
    return SealedChannel(called, inner, _keys(mine, other, opened=True))


async def agree_as_called(inner: Channel, identity: Identity, caller: str) -> SealedChannel:
    """Return a stream of `caller`'s, which came over another.

    Raises:
        LinkLost: somebody else opened it.
    """
    other, signature = await _greeting(inner)
    if not verify(caller, _signed(caller, identity.peer_id, other), signature):
        raise LinkLost(f"a stream through peer {inner.remote[-8:]} is not of {caller[-8:]}")
    mine = Agreement()
    answer = _signed(caller, identity.peer_id, other, mine.public)
    await inner.send_bytes(mine.public + identity.sign(answer))
    return SealedChannel(caller, inner, _keys(mine, other, opened=False))


async def _greeting(inner: Channel) -> tuple[bytes, bytes]:
    data = bytearray(PUBLIC_BYTES + SIGNATURE_BYTES)
    await inner.receive_into(memoryview(data))
    return bytes(data[:PUBLIC_BYTES]), bytes(data[PUBLIC_BYTES:])


def _signed(caller: str, called: str, *keys: bytes) -> bytes:
    return b"\n".join((_GREETING, caller.encode(), called.encode(), b"".join(keys)))


def _keys(mine: Agreement, other: bytes, *, opened: bool) -> Keys:
    try:
        return mine.keys(_SECRET, other, opened=opened)
    except OSError as error:
        raise LinkLost(str(error)) from error


class SealedChannel(Channel):
    """One stream to one peer, encrypted, over a stream to another peer."""

    def __init__(self, remote: str, inner: Channel, keys: Keys) -> None:
        """Wrap a stream on which both ends have agreed on keys."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        super().__init__(remote, inner.stall_s)
        self.relay_id = inner.remote
        """The peer that it leads through."""
        self._inner = inner
        self._sealing, self._opening = AESGCM(keys.send), AESGCM(keys.receive)
        self._sent_frames = self._received_frames = 0
        self._out = memoryview(bytearray(_LENGTH.size + CHUNK_BYTES + _TAG_BYTES))
        self._in = memoryview(bytearray(_LENGTH.size + CHUNK_BYTES + _TAG_BYTES))
        self._filled = 0
        self._rest = memoryview(b"")

    def close(self) -> None:
        """Close the stream; idempotent, does not block."""
        self._inner.close()

    async def _write(self, view: memoryview) -> None:
        if not len(view):
            return
        frame = self._out[: _LENGTH.size + len(view) + _TAG_BYTES]
        _LENGTH.pack_into(frame, 0, len(view) + _TAG_BYTES)
        nonce = self._sent_frames.to_bytes(_NONCE_BYTES, "big")
        self._sent_frames += 1
        self._sealing.encrypt_into(nonce, view, None, frame[_LENGTH.size :])
        try:
            for start in range(0, len(frame), _STEP_BYTES):
                await self._inner.send_bytes(frame[start : start + _STEP_BYTES])
                self._went()
        except LinkLost as error:
            raise OSError(str(error)) from error
        except BaseException:
            self.close()  # half a frame is out: nothing after it could be read
            raise

    async def _read_into(self, view: memoryview) -> int:
        from cryptography.exceptions import InvalidTag

        if not self._rest:
            frame = await self._frame()
            if not frame:
                return 0
            nonce = self._received_frames.to_bytes(_NONCE_BYTES, "big")
            self._received_frames += 1
            try:
                self._rest = memoryview(self._opening.decrypt(nonce, frame, None))
            except InvalidTag:
                raise OSError("what arrived was not sent by this peer") from None
        count = min(len(view), len(self._rest))
        view[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    async def _frame(self) -> memoryview:
        """Return the next frame, valid until the next call; empty at the end of the stream."""
        if not await self._gather(_LENGTH.size):
            return memoryview(b"")
        (length,) = _LENGTH.unpack_from(self._in)
        if not _TAG_BYTES < length <= CHUNK_BYTES + _TAG_BYTES:
            raise OSError(f"a frame of {length} bytes")
        if not await self._gather(_LENGTH.size + length):
            return memoryview(b"")
        self._filled = 0
        return self._in[_LENGTH.size : _LENGTH.size + length]

    async def _gather(self, wanted: int) -> bool:
        """Read until so much of a frame is there; says False if the stream ends before.

        Who gives up waiting may wait again: what has come is kept.
        """
        while self._filled < wanted:
            try:
                count = await self._inner.receive_some(self._in[self._filled : wanted])
            except LinkLost as error:
                raise OSError(str(error)) from error
            if not count:
                return False
            self._filled += count
            self._came()
        return True
