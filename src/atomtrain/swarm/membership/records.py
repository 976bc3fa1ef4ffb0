"""Membership records: what each peer tells all others, how it is signed, and what they make of it.

Anybody can write to the hash table, and everybody keeps what others write. A record says itself
until when it counts, and that is signed too: an old one cannot be put back with a new time. So it
lies in the hash table:

    magic (6 bytes) | signature (64) | expiry (float64, big endian) | record
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from atomtrain.errors import BadMessage
from atomtrain.swarm.anchors.stamps import Stamp
from atomtrain.swarm.transport.buckets import NEW_BYTES, Buckets, record_allowances
from atomtrain.swarm.transport.identity import SIGNATURE_BYTES, Identity, verify

RECORD_BYTES_MAX = 8 << 20
TEXT_MAX = 512
"""Characters of a name or an address, at most: a record with a longer one counts for nobody."""
JOINING, TRAINING, LEFT = "joining", "training", "left"
_STATES = (JOINING, TRAINING, LEFT)
_MAGIC = b"atom3 "
_EXPIRY = struct.Struct(">d")
_HEAD_BYTES = len(_MAGIC) + SIGNATURE_BYTES + _EXPIRY.size
EXPIRY_S_MAX = 3600.0
"""No record counts for longer than this."""
_CLOCKS_S = 10.0
"""By how much the swarm's times of two peers may differ."""
_GOOD_BYTES_MAX = 32 << 20
"""Records that a reader remembers, in all: those of thousands of peers."""
_PEERS_MAX = 16384
"""Peers of which a reader remembers how long their records are."""
_RECORD_BYTES_USUAL = 1 << 11
"""What a peer's first record counts at least: peers are many where records are short."""
_TABLE = "the hash table"
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


class _OfManifest(msgspec.Struct):
    manifest: _Text


def manifest_of(data: bytes) -> str:
    """Return what a record says of the manifest, whatever else is in it.

    Raises:
        BadMessage: it is not a record.
    """
    if not isinstance(data, bytes) or len(data) > RECORD_BYTES_MAX:
        raise BadMessage("membership record is not bytes, or too long")
    try:
        return msgspec.json.decode(data, type=_OfManifest).manifest
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadMessage(f"membership record cannot be read: {error!r}") from error


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


def sign_record(identity: Identity, run: str, record: bytes, expires_s: float) -> bytes:
    """Return what goes into the hash table; `expires_s` is the swarm's time."""
    tail = _EXPIRY.pack(expires_s) + record
    return _MAGIC + identity.sign(_signed(run, identity.peer_id, tail)) + tail


class RecordReader:
    """Opens records of a run; checks each one's signature once only.

    Every replica of the hash table shows a node all records at each beat, nearly all of them as
    they were a moment ago. Checking a signature costs a hundred times what comparing the bytes
    with those of a good record does.

    All records that it lets in take memory, and anybody can sign those of made-up peers. So there
    are bounds on how fast they grow, whoever they are of: see `record_allowances`.
    """

    def __init__(self, run: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Know no record yet. `clock` returns seconds that only grow."""
        self._run = run
        self._buckets = Buckets(record_allowances(EXPIRY_S_MAX), clock)
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """By peer: the longest record so far, in bytes; who was heard of last comes last."""
        self._good: dict[bytes, str] = {}  # peer by record, the oldest first
        self._good_bytes = 0

    def open(self, peer_id: str, data: bytes, now_s: float) -> tuple[bytes, float]:
        """Return the record that `peer_id` signed for this run, and until when it counts.

        Raises:
            BadMessage: somebody else made it, it is of another run, has expired, or never would;
                or there are too many new ones.
        """
        if isinstance(data, bytes) and self._good.get(data) == peer_id:
            return _valid_now(data, now_s)
        grown = self._grown(peer_id, data)
        if grown and not self._buckets.take(NEW_BYTES, "", _TABLE, grown):
            raise BadMessage("more new membership records than there is room for now")
        try:
            check_signature(peer_id, self._run, data)
        except BadMessage:  # nothing of it is kept
            self._buckets.give_back(NEW_BYTES, "", _TABLE, grown)
            raise
        self._sizes[peer_id] = self._sizes.get(peer_id, 0) + grown
        self._sizes.move_to_end(peer_id)
        if len(self._sizes) > _PEERS_MAX:
            self._sizes.popitem(last=False)
        self._remember(peer_id, data)
        return _valid_now(data, now_s)

    def _grown(self, peer_id: str, data: bytes) -> int:
        """Return how many bytes a record takes beyond what those of its peer did so far."""
        if not isinstance(peer_id, str) or not isinstance(data, bytes):
            return 0
        return max(0, max(len(data), _RECORD_BYTES_USUAL) - self._sizes.get(peer_id, 0))

    def _remember(self, peer_id: str, data: bytes) -> None:
        self._good_bytes += len(data) if data not in self._good else 0
        self._good[data] = peer_id
        while self._good_bytes > _GOOD_BYTES_MAX:
            oldest = next(iter(self._good))
            del self._good[oldest]
            self._good_bytes -= len(oldest)


def check_signature(peer_id: str, run: str, data: bytes) -> None:
    """Check that `peer_id` signed a record of this run, whenever that was.

    Raises:
        BadMessage: it did not, or this is not a record.
    """
    if not isinstance(peer_id, str) or not isinstance(data, bytes):
        raise BadMessage("a membership record that is not bytes")
    if not _HEAD_BYTES <= len(data) <= RECORD_BYTES_MAX:
        raise BadMessage("a membership record of impossible size")
    signature = data[len(_MAGIC) : len(_MAGIC) + SIGNATURE_BYTES]
    tail = data[len(_MAGIC) + SIGNATURE_BYTES :]
    if not data.startswith(_MAGIC) or not verify(peer_id, _signed(run, peer_id, tail), signature):
        raise BadMessage("a membership record that its peer did not sign")


def _valid_now(data: bytes, now_s: float) -> tuple[bytes, float]:
    (expires_s,) = _EXPIRY.unpack_from(data, _HEAD_BYTES - _EXPIRY.size)
    if not now_s < expires_s <= now_s + EXPIRY_S_MAX + _CLOCKS_S:
        raise BadMessage("a membership record that has expired, or is of the future")
    return data[_HEAD_BYTES:], expires_s


def _signed(run: str, peer_id: str, tail: bytes) -> bytes:
    return f"atom membership\n{run}\n{peer_id}\n".encode() + tail
