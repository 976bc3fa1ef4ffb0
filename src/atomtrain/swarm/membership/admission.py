"""Who is admitted to a run: those that know its key, those on a list, or, without either, anybody.

The transport proves who is at the other end of a stream; a proof made with the run's key binds both
ends' ids, so that it is worth nothing to anybody else and needs no challenge. Membership records,
which anybody can write, carry the same kind of proof over all their bytes.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from atomtrain.errors import BadMessage, ConfigError

KEY_BYTES_MIN = 16
_STRETCHING = {"n": 1 << 15, "r": 8, "p": 1, "maxmem": 1 << 26, "dklen": 32}
"""Of scrypt (RFC 7914): a guess at a secret takes about 0.1 s and 32 MiB of memory."""
NEEDS_KEY = "it admits only peers that know the run's key"
"""How the reason begins for which a peer without the run's key is turned away."""
_FILE_BYTES_MAX = 1 << 20
_PROOF_BYTES = 32
_PREFIX = "sealed "


def read_secret(path: Path) -> bytes:
    """Return a run's secret, whatever a file of at least 16 bytes contains.

    Raises:
        ConfigError: it cannot be read, or is too short to be a secret.
    """
    data = _read(path, "run key").strip()
    if len(data) < KEY_BYTES_MIN:
        raise ConfigError(
            f"the run key in {path} has {len(data)} bytes; allowed are {KEY_BYTES_MIN} or more: "
            "make one with 'atom identity --new-run-key FILE'"
        )
    return data


@functools.lru_cache(maxsize=8)
def key_of(secret: bytes, run: str) -> bytes:
    """Return a run's key: its secret, stretched, with the run's name as salt.

    Whoever hears a proof can try secrets on it at leisure. One that a person made up is found soon
    unless each guess is dear; and guesses for one run are worth nothing for another.
    """
    return hashlib.scrypt(secret, salt=b"atom run key\n" + run.encode(), **_STRETCHING)


def make_secret(path: Path) -> None:
    """Write a new secret of 256 random bits, which only the file's owner may read.

    Raises:
        ConfigError: the file is there already, or cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(
            f"{path} is there already, and peers may use it; name a file that is not there yet"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}; name a file in a folder of yours"
        ) from error
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_urlsafe(32) + "\n")


def read_allowed(path: Path) -> frozenset[str]:
    """Return the peer ids in a file, one a line; what follows a `#` is a remark.

    Raises:
        ConfigError: it cannot be read, names nobody, or a line is not a peer id.
    """
    text = _read(path, "list of allowed peers").decode(errors="replace")
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    found = frozenset(line.rsplit("/", 1)[-1] for line in lines if line)
    for peer_id in sorted(found):
        if not (peer_id.isascii() and peer_id.isalnum() and 40 <= len(peer_id) <= 64):
            raise ConfigError(
                f"{peer_id[:80]!r} in {path} is not a peer id; give one a line, as at the end of "
                "the address that a peer prints: 12D3Koo..."
            )
    if not found:
        raise ConfigError(f"{path} names no peer; give one id a line, or leave the option out")
    return found


def _read(path: Path, what: str) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_FILE_BYTES_MAX)
    except OSError as error:
        raise ConfigError(
            f"the {what} {path} cannot be read: {error.strerror}; check the path"
        ) from error


@dataclass(frozen=True)
class Admission:
    """One peer's rule for whom it talks to; with neither key nor list it admits everybody."""

    run: str
    peer_id: str
    key: bytes | None = None
    """Shared by all peers of the run."""
    allowed: frozenset[str] | None = None
    """Peer ids; this peer's own need not be among them."""

    @property
    def is_open(self) -> bool:
        """Whether strangers take part."""
        return self.key is None and self.allowed is None

    def proof(self, to: str) -> str:
        """Return what shows peer `to` that this peer knows the key; empty without one."""
        return self._made("stream", self.peer_id, to, b"")

    def refusal(self, remote: str, proof: str) -> str:
        """Return why a peer is turned away, or an empty string."""
        if self.allowed is not None and remote not in self.allowed and remote != self.peer_id:
            return (
                f"peer {remote} is not on its list of allowed peers: make an id that stays with "
                "'atom identity FILE', have it put on that list, and give --identity FILE"
            )
        if not self._same(proof, self._made("stream", remote, self.peer_id, b"")):
            if proof:
                return f"{NEEDS_KEY}, and this one has another: copy the file for --run-key again"
            return f"{NEEDS_KEY}: give it with --run-key FILE"
        return ""

    def seal(self, record: bytes) -> bytes:
        """Return a membership record that others can tell from a stranger's."""
        if self.key is None:
            return record
        return f"{_PREFIX}{self._made('record', self.peer_id, '', record)} ".encode() + record

    def unseal(self, peer_id: str, data: bytes) -> bytes:
        """Return the record of `peer_id` that `seal` was given.

        Raises:
            BadMessage: a stranger wrote it.
        """
        if self.allowed is not None and peer_id not in self.allowed:
            raise BadMessage("a record of a peer that is not on the list of allowed peers")
        if self.key is None:
            return data
        head = len(_PREFIX) + 2 * _PROOF_BYTES
        proof, record = data[len(_PREFIX) : head].decode(errors="replace"), data[head + 1 :]
        if not self._same(proof, self._made("record", peer_id, "", record)):
            raise BadMessage("a record by somebody who does not know the run's key")
        return record

    def _made(self, what: str, sender: str, receiver: str, body: bytes) -> str:
        if self.key is None:
            return ""
        text = "\n".join((what, self.run, sender, receiver, "")).encode()
        return hmac.new(self.key, text + body, hashlib.sha256).hexdigest()

    def _same(self, given: str, made: str) -> bool:
        return self.key is None or hmac.compare_digest(given.encode(), made.encode())
