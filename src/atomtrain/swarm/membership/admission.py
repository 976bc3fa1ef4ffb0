"""Who is admitted to a run: those that know its key, those on a list, or, without either, anybody.

The transport proves who is at the other end of a stream; a proof made with the run's key binds both
ends' ids, so that it is worth nothing to anybody else and needs no challenge. Membership records,
which anybody can write, carry the same kind of proof over all their bytes.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from pathlib import Path

from atomtrain.errors import ConfigError
from atomtrain.swarm.membership.config import SwarmConfig
from atomtrain.swarm.transport.messages import BadMessage

KEY_BYTES_MIN = 16
NEEDS_KEY = "it admits only peers that know the run's key"
"""How the reason begins for which a peer without the run's key is turned away."""
_FILE_BYTES_MAX = 1 << 20
_PROOF_BYTES = 32
_PREFIX = "sealed "


def read_key(path: Path) -> bytes:
    """Return the run's key, whatever a file of at least 16 bytes contains.

    Raises:
        ConfigError: it cannot be read, or is too short to be a secret.
    """
    data = _read(path, "run key").strip()
    if len(data) < KEY_BYTES_MIN:
        raise ConfigError(
            f"the run key in {path} has {len(data)} bytes; allowed are {KEY_BYTES_MIN} or more: "
            f"make one with 'head -c 32 /dev/urandom | base64 > {path}'"
        )
    return hashlib.sha256(data).digest()


def read_allowed(path: Path) -> frozenset[str]:
    """Return the peer ids in a file, one a line; what follows a `#` is a remark.

    Raises:
        ConfigError: it cannot be read, names nobody, or a line is no peer id.
    """
    text = _read(path, "list of allowed peers").decode(errors="replace")
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    found = frozenset(line.rsplit("/", 1)[-1] for line in lines if line)
    for peer_id in sorted(found):
        if not (peer_id.isascii() and peer_id.isalnum() and 40 <= len(peer_id) <= 64):
            raise ConfigError(
                f"{peer_id[:80]!r} in {path} is no peer id; give one a line, as at the end of the "
                "address that a peer prints: 12D3Koo..."
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


def admission_of(config: SwarmConfig, peer_id: str) -> Admission:
    """Return a peer's rule of admission; reads the files that the configuration names.

    Raises:
        ConfigError: one of them cannot be used.
    """
    return Admission(
        run=config.run,
        peer_id=peer_id,
        key=None if config.key_path is None else read_key(config.key_path),
        allowed=None if config.allow_path is None else read_allowed(config.allow_path),
    )
