"""Calls of the hash table are bounded by peer and by address, and refused before they cost much."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from atomtrain.errors import SwarmError
from atomtrain.swarm.transport.buckets import HOST_TIMES, RECORDS, DaemonCalls, record_allowances

EXPIRY_S = 30.0
BURST, PER_S = record_allowances(EXPIRY_S)[RECORDS]


class Table:
    """A hash table that counts its calls, and a daemon that knows two addresses."""

    def __init__(self) -> None:
        self.now_s, self.answered, self.looks = 0.0, 0, 0
        calls = DaemonCalls(EXPIRY_S, self._connected, lambda: self.now_s)
        self._bounded = calls.bounded(self._answer)

    async def _connected(self) -> list[tuple[str, tuple[str, ...]]]:
        self.looks += 1
        many = [(f"peer {i}", ("/ip4/192.0.2.7/tcp/4001",)) for i in range(40)]
        return [*many, ("honest", ("/ip4/192.0.2.9/tcp/4001",))]

    async def _answer(self, request: Any, context: Any) -> str:
        self.answered += 1
        return f"{request.ByteSize()} bytes of {context.remote_id}"

    async def call(self, peer_id: str, size_bytes: int = 100) -> bool:
        request = SimpleNamespace(ByteSize=lambda: size_bytes)
        try:
            answer = await self._bounded(request, SimpleNamespace(remote_id=peer_id))
        except SwarmError:
            return False
        assert answer == f"{size_bytes} bytes of {peer_id}"
        return True

    async def calls(self, times: int, peer_id: str, size_bytes: int = 100) -> int:
        return sum([await self.call(peer_id, size_bytes) for _ in range(times)])


def test_a_peer_that_calls_too_often_is_refused_before_the_table_hears_of_it() -> None:
    async def scenario() -> None:
        table = Table()
        let_through = await table.calls(2000, "peer 1")
        assert let_through == table.answered
        assert BURST * 0.9 <= let_through <= BURST
        assert await table.call("honest")
        table.now_s += 10
        assert await table.calls(2000, "peer 1") <= 10 * PER_S + 1

    asyncio.run(scenario())


def test_identities_at_one_address_have_what_it_has() -> None:
    async def scenario() -> None:
        table = Table()
        let_through = sum([await table.calls(500, f"peer {i}") for i in range(40)])
        assert let_through <= HOST_TIMES * BURST
        assert await table.call("honest")
        # Who is connected from nowhere that is known has one address, too.
        nowhere = sum([await table.calls(500, f"relayed {i}") for i in range(40)])
        assert nowhere <= HOST_TIMES * BURST
        assert table.looks == 1, "the daemon is asked at each call"

    asyncio.run(scenario())


@pytest.mark.parametrize("size_bytes", [100, 2_000, 200_000])
def test_a_peer_of_a_swarm_of_64_meets_no_limit(size_bytes: int) -> None:
    """8 calls a beat for ten minutes, a beat a second; 200 kB: a newcomer is given tables."""

    async def scenario() -> None:
        table = Table()
        assert not size_bytes > 10_000 or await table.calls(8, "honest", size_bytes) == 8
        for _ in range(600):
            assert await table.calls(8, "honest", min(size_bytes, 2_000)) == 8
            table.now_s += EXPIRY_S / 30

    asyncio.run(scenario())
