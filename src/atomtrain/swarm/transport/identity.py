"""A peer's key: who it is to all others, kept in a file in libp2p's format.

The key is Ed25519. The peer id contains the public key whole, so that whoever knows an id can check
what that peer has signed, and needs nothing else.

Formats: https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

import base58

from atomtrain.errors import ConfigError

_PRIVATE_HEAD = bytes((0x08, 0x01, 0x12, 0x40))
"""Protobuf: key type Ed25519, then 64 bytes of data (secret and public half)."""
_PUBLIC_HEAD = bytes((0x08, 0x01, 0x12, 0x20))
"""Protobuf: key type Ed25519, then 32 bytes of data."""
_ID_HEAD = bytes((0x00, len(_PUBLIC_HEAD) + 32))
"""Multihash of the kind that is not a hash: the encoded public key itself."""
_SECRET_BYTES = 32
SIGNATURE_BYTES = 64
_ID_LENGTH_MAX = 64


class Identity:
    """A key pair and the peer id that follows from it."""

    def __init__(self, secret: bytes) -> None:
        """`secret`: the 32 bytes of an Ed25519 private key."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self._key = Ed25519PrivateKey.from_private_bytes(secret)
        self._secret = secret
        self._public = self._key.public_key().public_bytes_raw()
        self.peer_id = base58.b58encode(_ID_HEAD + _PUBLIC_HEAD + self._public).decode()

    @classmethod
    def create(cls) -> Identity:
        """Return a new identity."""
        return cls(secrets.token_bytes(_SECRET_BYTES))

    @classmethod
    def load(cls, path: Path) -> Identity:
        """Return the identity in a file.

        Raises:
            ConfigError: it cannot be read, or is not a key of this kind.
        """
        try:
            with path.open("rb") as file:
                data = file.read(1024)
        except OSError as error:
            raise ConfigError(
                f"the key {path} cannot be read: {error.strerror}; check the path, or make one "
                f"with 'atom identity {path}'"
            ) from error
        secret = data[len(_PRIVATE_HEAD) : len(_PRIVATE_HEAD) + _SECRET_BYTES]
        if len(secret) == _SECRET_BYTES:
            identity = cls(secret)
            if data == identity.encode():
                return identity
        raise ConfigError(
            f"{path} is no Ed25519 key in libp2p's format; name a file that is one, or one that "
            "is not there yet and make it with 'atom identity FILE'"
        )

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Return the identity in a file; make file and folder first if they are not there.

        Raises:
            ConfigError: the file cannot be read or written.
        """
        if not path.exists():
            cls.create().save(path)
        return cls.load(path)

    def save(self, path: Path) -> None:
        """Write the key, readable by its owner only; an existing file is left as it is.

        Raises:
            ConfigError: the file cannot be written.
        """
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(self.encode())
                with contextlib.suppress(FileExistsError):  # of two that make it the first wins
                    os.link(temporary, path)
            finally:
                temporary.unlink()
        except OSError as error:
            raise ConfigError(
                f"the key {path} cannot be written: {error.strerror}; choose another path"
            ) from error

    def encode(self) -> bytes:
        """Return the private key as libp2p stores it."""
        return _PRIVATE_HEAD + self._secret + self._public

    def sign(self, data: bytes) -> bytes:
        """Return the signature of `data`, 64 bytes."""
        return self._key.sign(data)


def verify(peer_id: str, data: bytes, signature: bytes) -> bool:
    """Say whether the peer with this id signed `data`; False, too, if the id is none."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    public = public_key_of(peer_id)
    if public is None:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def public_key_of(peer_id: str) -> bytes | None:
    """Return the 32 bytes of the Ed25519 key in a peer id; None if it is no such id."""
    if len(peer_id) > _ID_LENGTH_MAX or not peer_id.isalnum():  # base58 would pass over spaces
        return None
    try:
        data = base58.b58decode(peer_id)
    except ValueError:
        return None
    head = _ID_HEAD + _PUBLIC_HEAD
    return data[len(head) :] if len(data) == len(head) + 32 and data.startswith(head) else None
