"""Membership records: what each peer tells all others about itself, and what they make of it."""

from __future__ import annotations

import base64
import binascii
import json
import struct
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from atomtrain.swarm.anchors.stamps import Stamp
from atomtrain.swarm.transport.messages import BadMessage

RECORD_BYTES_MAX = 8 << 20
TEXT_MAX = 512
"""Characters of a name or an address, at most: a record with a longer one counts for nobody."""
JOINING, TRAINING, LEFT = "joining", "training", "left"
_STATES = (JOINING, TRAINING, LEFT)
_ADDRESSES_MAX = 16
_NUMBER_MAX = 1 << 53
_Text = Annotated[str, Meta(max_length=TEXT_MAX)]
_Count = Annotated[int, Meta(ge=0, lt=_NUMBER_MAX)]
_Number = Annotated[float, Meta(ge=0.0, lt=float(_NUMBER_MAX))]


@dataclass(frozen=True, kw_only=True)
class PeerRecord:
    """What a peer publishes. Untrusted until `decode` has checked its form; even then only a claim.

    `sequence` is the swarm's time: it grows with each record of a peer, across restarts.
    """

    peer_id: _Text
    manifest: _Text
    """Start of the hash of the manifest: runs of one name are not one run."""
    name: _Text
    state: _Text
    sequence: _Number
    addresses: tuple[_Text, ...]
    next_round: _Count
    steps: _Count
    tokens: _Count
    tokens_per_s: _Number
    step_s: _Number
    round_s: _Number
    """Time of this peer's recent rounds; 0: not measured yet."""
    free_bytes_per_s: _Number
    """What this peer's link moves, each way, beyond what it uses; 0: not measured yet."""
    fetch_bytes_per_s: _Number
    """Rate at which this peer fetches anchors when it is behind; 0: not measured yet."""
    stamps: tuple[Stamp | None, ...]

    def encode(self) -> bytes:
        """Return the record as JSON."""
        body = dict(self.__dict__)
        body["stamps"] = _packed(self.stamps)
        return json.dumps(body).encode()

    @classmethod
    def decode(cls, peer_id: str, data: bytes, fragments: int) -> PeerRecord:
        """Return the record that `peer_id` published.

        Raises:
            BadMessage: it is malformed, or speaks for another peer or another run.
        """
        if not isinstance(data, bytes) or len(data) > RECORD_BYTES_MAX:
            raise BadMessage("membership record is not bytes, or too long")
        try:
            body = msgspec.json.decode(data)
            body["addresses"] = body["addresses"][:_ADDRESSES_MAX]
            body["stamps"] = _unpacked(body["stamps"], fragments)
            record = msgspec.convert(body, cls)
        except (msgspec.MsgspecError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise BadMessage(f"membership record cannot be read: {error!r}") from error
        if record.peer_id != peer_id or record.state not in _STATES:
            raise BadMessage("membership record of another peer, or in an unknown state")
        return record


@dataclass(frozen=True, kw_only=True)
class PeerStatus:
    """A member as displays show it."""

    peer_id: str
    name: str
    is_self: bool
    state: str
    """`joining`, `training` or `left`."""
    next_round: int
    steps: int
    tokens: int
    tokens_per_s: float
    step_s: float
    free_bytes_per_s: float
    """What its link moves beyond what it uses; 0: not measured yet."""
    behind: int
    """Fragments whose anchor is older than the best known."""
    reachable: bool
    """False from a failed contact until the peer's next record."""
    addresses: tuple[str, ...]
    seen_s: float = 0.0
    """When the peer made its last record, in the swarm's time; 0: never."""
    relays: int = 0
    """Peers through which it is reached by those that cannot dial it; 0: it can be dialled."""


_PACKED = struct.Struct(">QQ16s")
_NO_ANCHOR = (1 << 64) - 1


def _packed(stamps: tuple[Stamp | None, ...]) -> str:
    """Return 32 bytes a stamp, in base64: with hundreds of fragments they are most of a record."""
    empty = _PACKED.pack(_NO_ANCHOR, 0, bytes(16))
    packed = (
        empty if s is None else _PACKED.pack(s.version, s.tokens, bytes.fromhex(s.digest))
        for s in stamps
    )
    return base64.b64encode(b"".join(packed)).decode()


def _unpacked(text: Any, fragments: int) -> tuple[Stamp | None, ...]:
    if not isinstance(text, str) or len(text) != -(-_PACKED.size * fragments // 3) * 4:
        raise ValueError(f"not the stamps of {fragments} fragments")
    try:
        data = base64.b64decode(text, validate=True)
        return tuple(_stamp(*packed) for packed in _PACKED.iter_unpack(data))
    except (binascii.Error, struct.error) as error:
        raise ValueError(str(error)) from error


def _stamp(version: int, tokens: int, digest: bytes) -> Stamp | None:
    if version == _NO_ANCHOR:
        return None
    if max(version, tokens) >= _NUMBER_MAX:
        raise ValueError("a stamp out of range")
    return Stamp(version, tokens, digest.hex())
