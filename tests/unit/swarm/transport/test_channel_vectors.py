"""The channel's test vectors (docs/protocol.md): fixed keys, and all bytes that follow from them.

The code must make these bytes. The keys are derived once more here, from HMAC alone (RFC 5869), and
the frames opened with another nonce than the one that counts.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from atomtrain.swarm.transport import sealed
from atomtrain.swarm.transport.direct import _name
from atomtrain.swarm.transport.frames import FrameChannel, Keys
from atomtrain.swarm.transport.identity import Identity, verify
from atomtrain.swarm.transport.secure import Agreement

VECTORS = Path(__file__).with_name("channel_vectors.json")
CALLER, CALLED = (bytes([n]) * 32 for n in (1, 2))
"""Secrets of the Ed25519 keys."""
OPENS, ANSWERS = (bytes([n]) * 32 for n in (3, 4))
"""Secrets of the X25519 keys."""
TOKEN = bytes(range(32))
PLAIN = [b"first frame", b"second", bytes(300)]


class _Frames(FrameChannel):
    """Frames that go nowhere."""

    async def _write(self, view: memoryview) -> None:
        raise AssertionError

    async def _receive(self, view: memoryview, wanted_bytes: int) -> int:
        raise AssertionError

    def close(self) -> None:
        """Nothing is open."""


def agreement(secret: bytes) -> Agreement:
    made = Agreement()
    made._private = X25519PrivateKey.from_private_bytes(secret)
    made.public = made._private.public_key().public_bytes_raw()
    return made


def frames(keys: Keys) -> list[str]:
    channel = _Frames("other", 1.0, keys)
    return [bytes(channel._sealed(memoryview(plain))).hex() for plain in PLAIN]


def computed() -> dict[str, Any]:
    """Return what the code makes of the fixed keys."""
    opens, answers = agreement(OPENS), agreement(ANSWERS)
    caller, called = Identity(CALLER), Identity(CALLED)
    straight = opens.keys(TOKEN, answers.public, opened=True)
    assert straight == Keys(*reversed(answers.keys(TOKEN, opens.public, opened=False)))
    relayed = sealed._keys(opens, answers.public, opened=True)
    hello = sealed._signed(caller.peer_id, called.peer_id, opens.public)
    answer = sealed._signed(caller.peer_id, called.peer_id, opens.public, answers.public)
    return {
        "caller": caller.peer_id,
        "called": called.peer_id,
        "straight": {
            "token": TOKEN.hex(),
            "caller_sends": (_name(TOKEN) + opens.public).hex(),
            "listener_sends": answers.public.hex(),
            "keys": [straight.send.hex(), straight.receive.hex()],
            "frames": frames(straight),
        },
        "relayed": {
            "caller_sends": (opens.public + caller.sign(hello)).hex(),
            "called_sends": (answers.public + called.sign(answer)).hex(),
            "keys": [relayed.send.hex(), relayed.receive.hex()],
            "frames": frames(relayed),
        },
    }


@pytest.fixture(scope="module")
def vectors() -> dict[str, Any]:
    return json.loads(VECTORS.read_text())  # type: ignore[no-any-return]


def test_the_code_makes_these_bytes(vectors: dict[str, Any]) -> None:
    assert computed() == vectors


def hkdf(salt: bytes, material: bytes, info: bytes) -> bytes:
    """Return 64 bytes by HKDF-SHA256 (RFC 5869)."""
    key = hmac.digest(salt, material, hashlib.sha256)
    first = hmac.digest(key, info + bytes([1]), hashlib.sha256)
    return first + hmac.digest(key, first + info + bytes([2]), hashlib.sha256)


@pytest.mark.parametrize("kind", ["straight", "relayed"])
def test_keys_and_frames_follow_from_what_the_page_says(vectors: dict[str, Any], kind: str) -> None:
    told = vectors[kind]
    secret = TOKEN if kind == "straight" else b"atomtrain relayed stream 1, keys"
    public = [X25519PrivateKey.from_private_bytes(s).public_key() for s in (OPENS, ANSWERS)]
    shared = X25519PrivateKey.from_private_bytes(OPENS).exchange(public[1])
    info = b"atomtrain straight stream 1" + b"".join(p.public_bytes_raw() for p in public)
    derived = hkdf(secret, shared + secret, info)
    assert told["keys"] == [derived[:32].hex(), derived[32:].hex()]
    for number, (frame, plain) in enumerate(zip(told["frames"], PLAIN, strict=True)):
        data = bytes.fromhex(frame)
        assert int.from_bytes(data[:4], "big") == len(data) - 4 == len(plain) + 16
        cipher = AESGCM(derived[:32])
        assert cipher.decrypt(number.to_bytes(12, "big"), data[4:], None) == plain
        with pytest.raises(InvalidTag):
            cipher.decrypt((number + 1).to_bytes(12, "big"), data[4:], None)


def test_who_is_at_the_ends_of_a_relayed_stream_is_signed(vectors: dict[str, Any]) -> None:
    ends = [vectors["caller"].encode(), vectors["called"].encode()]
    hello, answer = (bytes.fromhex(vectors["relayed"][f"{who}_sends"]) for who in
                     ("caller", "called"))  # fmt: skip
    first = b"\n".join([b"atomtrain relayed stream 1", *ends, hello[:32]])
    both = b"\n".join([b"atomtrain relayed stream 1", *ends, hello[:32] + answer[:32]])
    assert verify(vectors["caller"], first, hello[32:])
    assert verify(vectors["called"], both, answer[32:])
    assert not verify(vectors["caller"], both, answer[32:])


def test_a_public_key_that_leads_to_zeros_is_refused() -> None:
    with pytest.raises(OSError, match="no key can be agreed"):
        agreement(OPENS).keys(TOKEN, bytes(32), opened=True)
    assert X25519PublicKey.from_public_bytes(bytes(32)).public_bytes_raw() == bytes(32)


if __name__ == "__main__":  # makes them anew, where the protocol changes
    asyncio.set_event_loop(asyncio.new_event_loop())
    VECTORS.write_text(json.dumps(computed(), indent=1) + "\n")
