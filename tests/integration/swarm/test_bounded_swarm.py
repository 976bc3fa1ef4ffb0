"""A real peer knows from where others ask, and refuses calls of the hash table beyond a limit."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from atomtrain.swarm import Manifest, Swarm
from atomtrain.swarm.transport import buckets, libp2p
from atomtrain.swarm.transport.buckets import NEW_BYTES, RECORDS, STREAMS, Allowance, DaemonCalls
from atomtrain.swarm.transport.direct import Offer
from atomtrain.swarm.transport.transport import Channel, LinkLost
from tests.integration.swarm.test_swarm_in_process import (
    ELEMENTS,
    Model,
    config,
    cross_until,
    joined,
    together,
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[DaemonCalls]:
    """What counts calls, of each peer that is started."""
    made: list[DaemonCalls] = []

    class Kept(DaemonCalls):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr(libp2p, "DaemonCalls", Kept)
    return made


def test_who_asks_is_counted_by_peer_and_by_address(calls: list[DaemonCalls]) -> None:
    model, copy = Model(1.0), Model()
    first = Swarm.found(config("bounded"), Manifest("bounded", ELEMENTS, {}), model)
    try:
        other = joined(config("bounded", join=(first.address,)))
        try:
            other.download(copy)
            cross_until(lambda reports: len(together(reports)) >= 4, (first, model), (other, copy))
            counted = calls[0]._buckets
            assert (RECORDS, other.peer_id) in counted._peers
            assert (RECORDS, "127.0.0.1") in counted._hosts
            asked = first._service._bounds._buckets
            assert (STREAMS, other.peer_id) in asked._peers
            assert (STREAMS, "127.0.0.1") in asked._hosts
            burst = asked._allowed[STREAMS].burst
            left = asked._peers[STREAMS, other.peer_id].tokens
            assert left > burst / 2, "what rounds have called for counts"
        finally:
            other.leave(2.0)
    finally:
        first.leave(2.0)


def test_a_daemon_answers_no_calls_beyond_the_limit(
    calls: list[DaemonCalls], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks too often gets an error at once, which says so."""
    allowed = {RECORDS: Allowance(3.0, 0.0), NEW_BYTES: Allowance(1e9, 1e9)}
    monkeypatch.setattr(buckets, "record_allowances", lambda _: allowed)

    async def scenario() -> list[bool]:
        from hivemind.proto import dht_pb2

        async def answer(request: dht_pb2.PingRequest, context: Any) -> dht_pb2.PingResponse:
            return dht_pb2.PingResponse(available=True)

        one = await libp2p.Libp2pTransport.create(config().endpoint)
        two = await libp2p.Libp2pTransport.create(config().endpoint)
        try:
            await one.p2p.add_protobuf_handler("ping", answer, dht_pb2.PingRequest)
            await two.dial(one.peer_id, [one.address])
            return [await _called(two, one, dht_pb2) for _ in range(6)]
        finally:
            await two.close()
            await one.close()

    answered = asyncio.run(scenario())
    assert answered[:2] == [True, True]
    assert answered[3:] == [False, False, False]


def test_who_asks_for_straight_streams_too_often_is_told_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(libp2p, "allowances", lambda _: {STREAMS: Allowance(2.0, 0.0)})

    async def scenario() -> list[bool]:
        one = await libp2p.Libp2pTransport.create(config().endpoint)
        two = await libp2p.Libp2pTransport.create(config().endpoint)
        try:
            await one.serve(_close)
            two.learn(one.peer_id, [one.address])
            return [await _offered(two, one.peer_id) for _ in range(4)]
        finally:
            await two.close()
            await one.close()

    assert asyncio.run(scenario()) == [True, True, False, False]


async def _close(channel: Channel) -> None:
    channel.close()


async def _offered(by: libp2p.Libp2pTransport, peer_id: str) -> bool:
    try:
        Offer.decode(await by._ask_offer(peer_id))
    except LinkLost as error:
        assert "closed the stream" in str(error)  # noqa: PT017 - not that it is gone
        return False
    return True


async def _called(by: libp2p.Libp2pTransport, at: libp2p.Libp2pTransport, proto: Any) -> bool:
    from hivemind.p2p import PeerID
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PHandlerError

    try:
        said = await by.p2p.call_protobuf_handler(
            PeerID.from_base58(at.peer_id), "ping", proto.PingRequest(), proto.PingResponse
        )
    except P2PHandlerError as error:
        return "too many calls" not in str(error)
    return bool(said.available)
