"""A stream through a peer that need not be trusted: proved and encrypted from end to end.

    caller -> called   public key (32 bytes) | signature of it and both ids (64)
    called -> caller   public key (32 bytes) | signature of both keys and both ids (64)
    then frames in both directions (`frames`)

Keys are those of an X25519 agreement; the signatures are by the keys that the peers' ids name. So
who is between can cut the stream and count its bytes, and neither read it, change it, nor stand at
one of its ends. A greeting that is repeated leads to keys that who repeats it does not have.
"""

from __future__ import annotations

from atomtrain.swarm.transport.frames import FrameChannel, Keys
from atomtrain.swarm.transport.identity import SIGNATURE_BYTES, Identity, verify
from atomtrain.swarm.transport.secure import PUBLIC_BYTES, Agreement
from atomtrain.swarm.transport.transport import Channel, LinkLost

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


class SealedChannel(FrameChannel):
    """One stream to one peer, encrypted, over a stream to another peer."""

    def __init__(self, remote: str, inner: Channel, keys: Keys) -> None:
        """Wrap a stream on which both ends have agreed on keys."""
        super().__init__(remote, inner.stall_s, keys)
        self.relay_id = inner.remote
        """The peer that it leads through."""
        self._inner = inner

    def close(self) -> None:
        """Close the stream; idempotent, does not block."""
        self._inner.close()

    async def _write(self, view: memoryview) -> None:
        if not len(view):
            return
        frame = self._sealed(view)
        try:
            for start in range(0, len(frame), _STEP_BYTES):
                await self._inner.send_bytes(frame[start : start + _STEP_BYTES])
                self._went()
        except LinkLost as error:
            raise OSError(str(error)) from error
        except BaseException:
            self.close()  # half a frame is out: nothing after it could be read
            raise
        self._unused(frame)

    async def _receive(self, view: memoryview, wanted_bytes: int) -> int:
        try:
            return await self._inner.receive_some(view)
        except LinkLost as error:
            raise OSError(str(error)) from error
