"""Membership records as they lie in the hash table: signed by their peer, and valid until a time.

Anybody can write to the hash table, and everybody keeps what others write. A record says itself
until when it counts, and that is signed too: an old one cannot be put back with a new time.

    magic (6 bytes) | signature (64) | expiry (float64, big endian) | record
"""

from __future__ import annotations

import struct

from atomtrain.swarm.membership.records import RECORD_BYTES_MAX
from atomtrain.swarm.transport.identity import SIGNATURE_BYTES, Identity, verify
from atomtrain.swarm.transport.messages import BadMessage

_MAGIC = b"atom3 "
_EXPIRY = struct.Struct(">d")
_HEAD_BYTES = len(_MAGIC) + SIGNATURE_BYTES + _EXPIRY.size
EXPIRY_S_MAX = 3600.0
"""No record counts for longer than this."""
_CLOCKS_S = 10.0
"""By how much the swarm's times of two peers may differ."""
_GOOD_BYTES_MAX = 32 << 20
"""Records that a reader remembers, in all: those of thousands of peers."""


def sign_record(identity: Identity, run: str, record: bytes, expires_s: float) -> bytes:
    """Return what goes into the hash table; `expires_s` is the swarm's time."""
    tail = _EXPIRY.pack(expires_s) + record
    return _MAGIC + identity.sign(_signed(run, identity.peer_id, tail)) + tail


class RecordReader:
    """Opens records of a run; checks each one's signature once only.

    Every replica of the hash table shows a node all records at each beat, nearly all of them as
    they were a moment ago. Checking a signature costs a hundred times what comparing the bytes
    with those of a good record does.
    """

    def __init__(self, run: str) -> None:
        """Know no record yet."""
        self._run = run
        self._good: dict[bytes, str] = {}  # peer by record, the oldest first
        self._good_bytes = 0

    def open(self, peer_id: str, data: bytes, now_s: float) -> tuple[bytes, float]:
        """Return the record that `peer_id` signed for this run, and until when it counts.

        Raises:
            BadMessage: somebody else made it, it is of another run, has expired, or never would.
        """
        if not isinstance(data, bytes) or self._good.get(data) != peer_id:
            check_signature(peer_id, self._run, data)
            self._remember(peer_id, data)
        return _valid_now(data, now_s)

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
        BadMessage: it did not, or this is no record.
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
