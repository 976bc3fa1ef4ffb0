"""Records of made-up peers take a bounded amount of memory, and those of members come through."""

from __future__ import annotations

import pytest

from atomtrain.errors import BadMessage
from atomtrain.swarm.membership.records import RecordReader, sign_record
from atomtrain.swarm.transport.buckets import HOST_TIMES, NEW_BYTES, record_allowances
from atomtrain.swarm.transport.identity import Identity

NOW_S = 1e9
BURST, PER_S = (HOST_TIMES * each for each in record_allowances(30.0)[NEW_BYTES])


class Flooded:
    """A node's reader, and how many bytes of records it has let in."""

    def __init__(self) -> None:
        self.now_s, self.held = 0.0, dict[str, int]()
        self._reader = RecordReader("run", lambda: self.now_s)

    def opens(self, identity: Identity, body: bytes) -> bool:
        data = sign_record(identity, "run", body, NOW_S + 30)
        try:
            assert self._reader.open(identity.peer_id, data, NOW_S) == (body, NOW_S + 30)
        except BadMessage:
            return False
        self.held[identity.peer_id] = len(data)
        return True


def test_records_of_made_up_peers_grow_no_faster_than_their_bound() -> None:
    flooded = Flooded()
    member = Identity.create()
    assert flooded.opens(member, b"a member" * 100)
    strangers = [Identity.create() for _ in range(100)]
    refused = [not flooded.opens(each, bytes(100_000)) for each in strangers]
    assert any(refused)
    assert sum(flooded.held.values()) <= BURST
    flooded.now_s += 3.0
    for each in strangers:
        flooded.opens(each, bytes(100_000))
    assert sum(flooded.held.values()) <= BURST + 3.0 * PER_S
    for beat in range(1000):  # who was there before goes on
        assert flooded.opens(member, b"a member" * 99 + str(beat).encode())


def test_a_record_that_grows_counts_by_what_it_grows() -> None:
    flooded = Flooded()
    stranger = Identity.create()
    sizes = range(0, 8_000_000, 1 << 18)
    assert not all(flooded.opens(stranger, bytes(size)) for size in sizes)
    assert max(flooded.held.values()) <= BURST


def test_records_that_nobody_signed_take_nothing_from_the_others() -> None:
    flooded = Flooded()
    data = sign_record(Identity.create(), "run", bytes(1_000_000), NOW_S + 30)
    for _ in range(100):
        with pytest.raises(BadMessage, match="did not sign"):
            flooded._reader.open(Identity.create().peer_id, data, NOW_S)
    assert flooded.opens(Identity.create(), bytes(4_000_000))


def test_a_swarm_of_64_comes_at_once() -> None:
    """With the records of 500 fragments, and in ten beats a second all of them anew."""
    flooded = Flooded()
    members = [Identity.create() for _ in range(64)]
    for beat in range(10):
        assert all(flooded.opens(each, bytes(32_000) + bytes([beat])) for each in members)
