"""Straight streams: what goes in comes out, and nobody without the token gets a word through."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import tracemalloc
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atomtrain.errors import BadMessage
from atomtrain.swarm.transport.buckets import HOST_TIMES, STREAMS, Allowance
from atomtrain.swarm.transport.direct import OFFER_BYTES, Congestion, Direct, Offer
from atomtrain.swarm.transport.messages import Propose
from atomtrain.swarm.transport.rates import Pacer
from atomtrain.swarm.transport.secure import Agreement, SecureChannel
from atomtrain.swarm.transport.transport import CHUNK_BYTES, Channel, LinkLost, host_of
from tests.support.waiting import PATIENCE_S


def _pair(secrets: tuple[bytes, bytes] = (b"s" * 32, b"s" * 32)) -> tuple[Channel, Channel]:
    one, other = socket.socketpair()
    mine, theirs = Agreement(), Agreement()
    keys = (
        mine.keys(secrets[0], theirs.public, opened=True),
        theirs.keys(secrets[1], mine.public, opened=False),
    )
    one.setblocking(False)
    other.setblocking(False)
    return SecureChannel("other", one, keys[0], 60.0), SecureChannel("one", other, keys[1], 60.0)


async def _both(*work: Awaitable[None]) -> None:
    await asyncio.wait_for(asyncio.gather(*work), PATIENCE_S)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 3 * CHUNK_BYTES), max_size=4), st.integers(9_000, 2 * CHUNK_BYTES))
def test_both_directions_at_once_in_any_pieces(sizes: list[int], read_bytes: int) -> None:
    async def scenario() -> None:
        one, other = _pair()
        data = [os.urandom(size) for size in sizes]

        async def send(channel: Channel) -> None:
            for piece in data:
                await channel.send_bytes(piece)

        async def receive(channel: Channel) -> None:
            whole = memoryview(bytearray(sum(sizes)))
            for start in range(0, len(whole), read_bytes):
                await channel.receive_into(whole[start : start + read_bytes])
            assert bytes(whole) == b"".join(data)

        await _both(send(one), send(other), receive(one), receive(other))
        assert one.sent_bytes == other.received_bytes == sum(sizes)
        await other.send(Propose(round_index=3))
        assert await one.receive(Propose, 60.0) == Propose(round_index=3)
        other.close()
        other.close()
        with pytest.raises(LinkLost, match="closed"):
            await one.receive(Propose, 60.0)
        with pytest.raises(LinkLost):
            await other.send(Propose(round_index=3))
        one.close()

    asyncio.run(scenario())


def test_streams_that_wait_hold_no_memory_for_frames() -> None:
    async def scenario() -> int:
        pairs = [_pair() for _ in range(20)]
        data, place = bytes(CHUNK_BYTES + 5), memoryview(bytearray(CHUNK_BYTES + 5))
        for one, other in pairs:
            await _both(one.send_bytes(data), other.receive_into(place))
        held_bytes = tracemalloc.get_traced_memory()[0]
        for pair in pairs:
            for end in pair:
                end.close()
        return held_bytes

    tracemalloc.start()
    try:
        assert asyncio.run(scenario()) < 20 * CHUNK_BYTES
    finally:
        tracemalloc.stop()


def test_how_long_silence_may_be_is_not_asked_at_each_frame() -> None:
    async def scenario() -> None:
        one, other = _pair()
        asked = []
        for end in (one, other):
            end.stall = lambda: asked.append(1) or 60.0  # type: ignore[func-returns-value]
        whole = 16 * CHUNK_BYTES
        await _both(one.send_bytes(bytes(whole)), other.receive_into(memoryview(bytearray(whole))))
        one.close()
        other.close()
        assert len(asked) == 2

    asyncio.run(scenario())


def test_what_is_sent_cannot_be_read_on_the_way_nor_changed() -> None:
    async def scenario(change: Callable[[bytearray], None] | None) -> None:
        one, other = _pair()
        between, end = socket.socketpair()
        outside = one._socket  # type: ignore[attr-defined]
        one._socket = between  # type: ignore[attr-defined]
        between.setblocking(False)
        await one.send_bytes(b"a secret message" * 10)
        wire = bytearray(end.recv(1 << 16))
        assert b"secret" not in wire
        if change is None:
            wire = wire * 2  # once more
        else:
            change(wire)
        outside.sendall(wire)
        got = bytearray(320 if change is None else 160)
        with pytest.raises(LinkLost, match=r"not sent by this peer|a frame of"):
            await other.receive_into(memoryview(got))
        for one_end in (outside, end):
            one_end.close()
        one.close()
        other.close()

    def flip(index: int) -> Callable[[bytearray], None]:
        def change(wire: bytearray) -> None:
            wire[index] ^= 1

        return change

    for index in (0, 5, 60, -1):
        asyncio.run(scenario(flip(index)))
    asyncio.run(scenario(None))


class _LateLoop(asyncio.SelectorEventLoop):
    """A loop whose clock stands still but for what it is set forward."""

    late_s = 0.0

    def time(self) -> float:
        return self.late_s


def _without_time(scenario: Coroutine[Any, Any, None]) -> None:
    """Run what no deadline shall end, however long this process stands still."""
    with asyncio.Runner(loop_factory=_LateLoop) as runner:
        runner.run(scenario)


def _relayed(stall_s: float) -> tuple[Channel, socket.socket, socket.socket, Channel]:
    """Return a channel, the end of its wire, the beginning of the next, and the other channel."""
    mine, theirs = Agreement(), Agreement()
    secret = b"s" * 32
    one, one_end = socket.socketpair()
    other_end, other = socket.socketpair()
    for end in (one, one_end, other_end, other):
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    sender = SecureChannel("other", one, mine.keys(secret, theirs.public, opened=True), stall_s)
    keys = theirs.keys(secret, mine.public, opened=False)
    return sender, one_end, other_end, SecureChannel("one", other, keys, stall_s)


def test_a_frame_that_comes_byte_by_byte_is_given_up() -> None:
    loop, stall_s = _LateLoop(), 10.0

    async def scenario() -> None:
        sender, taken_from, given_to, receiver = _relayed(stall_s)
        sending = asyncio.create_task(sender.send_bytes(bytes(CHUNK_BYTES)))
        receiving = asyncio.create_task(receiver.receive_into(memoryview(bytearray(CHUNK_BYTES))))
        for _ in range(20):
            await loop.sock_sendall(given_to, await loop.sock_recv(taken_from, 1))
            for _ in range(4):
                await asyncio.sleep(0)
            loop.late_s += 0.3 * stall_s
        assert receiving.done()
        with pytest.raises(LinkLost, match="nothing moved in time"):
            await receiving
        sending.cancel()
        for end in (sender, receiver, taken_from, given_to):
            end.close()

    with contextlib.closing(loop):
        loop.run_until_complete(scenario())


@pytest.mark.parametrize(("frames", "piece_bytes"), [(1, 4096), (12, 1 << 16)])
def test_a_slow_link_is_not_a_dead_one(frames: int, piece_bytes: int) -> None:
    """What is sent takes many times the stall deadline; what counts is that something moves."""
    loop, stall_s = _LateLoop(), 10.0

    async def scenario() -> None:
        sender, taken_from, given_to, receiver = _relayed(stall_s)
        data = os.urandom(frames * CHUNK_BYTES)
        got = memoryview(bytearray(len(data)))
        sending = asyncio.create_task(sender.send_bytes(data))
        receiving = asyncio.create_task(receiver.receive_into(got))
        while not receiving.done():
            piece = await loop.sock_recv(taken_from, piece_bytes)
            await loop.sock_sendall(given_to, piece)
            for _ in range(4):  # both ends have their turn
                await asyncio.sleep(0)
            loop.late_s += 0.15 * stall_s
        await receiving
        await sending
        assert loop.late_s > 5 * stall_s
        assert bytes(got) == data

        sending = asyncio.create_task(sender.send_bytes(data))
        receiving = asyncio.create_task(receiver.receive_into(got))
        await loop.sock_sendall(given_to, await loop.sock_recv(taken_from, 4096))
        for _ in range(4):
            await asyncio.sleep(0)
        loop.late_s += 1.1 * stall_s
        for task in (sending, receiving):
            with pytest.raises(LinkLost, match="nothing moved in time"):
                await task
        sender.close()
        receiver.close()
        taken_from.close()
        given_to.close()

    with contextlib.closing(loop):
        loop.run_until_complete(scenario())


def test_streams_share_an_upload_limit_and_take_turns() -> None:
    """By the loop's clock, which jumps over every wait."""
    loop = _LateLoop()
    pacer = Pacer(10_000.0)

    async def scenario() -> list[float]:
        pairs = [_relayed(0.1) for _ in range(2)]  # less than a turn takes
        begin_s = loop.time()
        ended_s = [0.0, 0.0]
        grants: list[int] = []

        async def send(index: int) -> None:
            channel = pairs[index][0]
            channel.pacer = pacer
            for _ in range(20):
                await channel.send_bytes(bytes(1400))
                grants.append(index)
            ended_s[index] = loop.time() - begin_s

        async def drain(index: int) -> None:
            while not sending.done():
                await asyncio.sleep(0)
                with contextlib.suppress(BlockingIOError):
                    pairs[index][1].recv(1 << 16)
                loop.late_s += 0.001

        sending = asyncio.gather(send(0), send(1))
        await asyncio.gather(sending, drain(0), drain(1))
        assert max(abs(grants[:n].count(0) - grants[:n].count(1)) for n in range(40)) <= 1
        for ends in pairs:
            for end in ends:
                end.close()
        return ended_s

    with contextlib.closing(loop):
        ended_s = loop.run_until_complete(scenario())
    assert 5.0 < min(ended_s) <= max(ended_s) < 7.0  # 56,000 bytes at 10,000 a second
    assert pacer.grant_bytes == 1400
    pacer.limit_bytes_per_s = float("inf")
    assert pacer.grant_bytes == CHUNK_BYTES


def test_without_the_secret_nothing_arrives() -> None:
    async def scenario() -> None:
        one, other = _pair((b"s" * 32, b"t" * 32))
        await one.send(Propose(round_index=3))
        with pytest.raises(LinkLost, match="not sent by this peer"):
            await other.receive(Propose, 60.0)
        one.close()
        other.close()

    asyncio.run(scenario())


@given(st.binary(max_size=300))
def test_garbage_is_no_offer(data: bytes) -> None:
    with pytest.raises(BadMessage):
        Offer.decode(data)


def test_offer_round_trip() -> None:
    offer = Offer(port=5, token="ab" * 32)
    assert Offer.decode(offer.encode()) == offer
    assert len(offer.encode()) == OFFER_BYTES
    for bad in ({"port": 0}, {"port": True}, {"port": "5"}, {"token": "ab"}, {"token": 7}):
        with pytest.raises(BadMessage):
            Offer.decode(json.dumps({"port": 5, "token": "ab" * 32, **bad}).encode())


@contextlib.asynccontextmanager
async def _listener(offers: dict[str, bytes]):  # type: ignore[no-untyped-def]
    async def ask(peer_id: str) -> bytes:
        return offers[peer_id]

    direct = Direct("127.0.0.1", 0, 60.0, ask)  # its deadlines are those of the loop's clock
    try:
        yield direct
    finally:
        direct.close()


def test_streams_open_by_offer_and_strangers_are_hung_up_on() -> None:
    async def scenario() -> None:
        offers: dict[str, bytes] = {}
        heard: list[tuple[str, int]] = []

        async def handle(channel: Channel) -> None:
            message = await channel.receive(Propose, 60.0)
            heard.append((channel.remote, message.round_index))
            await channel.send(message)
            await channel.wait_closed(60.0)
            channel.close()

        async with _listener(offers) as server, _listener(offers) as client:
            server.serve(handle)
            offers["server"] = server.offer("client").encode()
            assert server.offer("client") == server.offer("client") != server.offer("other")
            for fragment in range(3):
                channel = await client.open("server", ["127.0.0.1"])
                assert channel is not None
                await channel.send(Propose(round_index=fragment))
                await channel.receive(Propose, 60.0)
                channel.close()
            assert heard == [("client", 0), ("client", 1), ("client", 2)]

            port = Offer.decode(offers["server"]).port
            for garbage in (b"", b"x", os.urandom(48), os.urandom(5000)):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(garbage)
                if len(garbage) < 48:
                    writer.write_eof()
                with contextlib.suppress(ConnectionResetError):
                    assert len(await reader.read()) in (0, 32)
                writer.close()
            assert len(heard) == 3

    _without_time(scenario())


def test_a_restarted_peer_is_asked_again_and_without_a_way_there_is_none() -> None:
    async def scenario() -> None:
        offers: dict[str, bytes] = {}

        async def handle(channel: Channel) -> None:
            await channel.receive(Propose, 60.0)
            await channel.send(Propose(round_index=1))

        async with _listener(offers) as client:
            for _ in range(2):  # the second one has another port and token
                async with _listener(offers) as server:
                    server.serve(handle)
                    offers["server"] = server.offer("client").encode()
                    channel = await client.open("server", ["127.0.0.1"])
                    assert channel is not None
                    await channel.send(Propose(round_index=0))
                    await channel.receive(Propose, 60.0)
                    channel.close()
            assert await client.open("server", ["127.0.0.1"]) is None
            del offers["server"]
            assert await client.open("server", ["127.0.0.1"]) is None, "not tried for a while"
            offers["nowhere"] = b"what?"
            assert await client.open("nowhere", ["127.0.0.1"]) is None

    _without_time(scenario())


def test_streams_to_a_peer_that_has_gone_fail_together_and_once() -> None:
    """Several are opened at once, by an offer of which only the first finds out that it is old."""
    loop = _LateLoop()

    async def scenario() -> None:
        asked = 0

        async def ask(peer_id: str) -> bytes:
            nonlocal asked
            asked += 1
            await asyncio.sleep(0)
            if asked > 1:
                raise LinkLost("it is gone")
            return old.encode()

        async def handle(channel: Channel) -> None:
            await channel.receive(Propose, 60.0)

        client, server = Direct("127.0.0.1", 0, 60.0, ask), Direct("127.0.0.1", 0, 60.0, ask)
        with contextlib.closing(client):
            with contextlib.closing(server):
                old = server.offer("client")
                server.serve(handle)
                channel = await client.open("server", ["127.0.0.1"])
                assert channel is not None
                channel.close()
            tries = [client.open("server", ["127.0.0.1"]) for _ in range(3)]
            assert await asyncio.gather(*tries) == [None] * 3
            before = asked
            loop.late_s = 59.0
            assert await client.open("server", ["127.0.0.1"]) is None
            assert asked == before, "not tried for a minute"
            loop.late_s = 61.0
            assert await client.open("server", ["127.0.0.1"]) is None
            assert asked == before + 1, "then it is"

    with contextlib.closing(loop):
        loop.run_until_complete(scenario())


def test_a_firewall_that_swallows_everything_is_given_up_on_in_time() -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=0) as deaf:  # accepts, says nothing
            offers = {"deaf": Offer(port=deaf.getsockname()[1], token="ab" * 32).encode()}

            async def ask(peer_id: str) -> bytes:
                return offers[peer_id]

            client = Direct("127.0.0.1", 0, 5.0, ask)
            assert await client.open("deaf", ()) is None
            async with asyncio.timeout(PATIENCE_S):
                assert await client.open("deaf", ["127.0.0.1"] * 5, 0.2) is None
            client.close()

    asyncio.run(scenario())


def test_who_dials_without_end_is_hung_up_on_unheard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one address so many are heard; those that know their token do not count."""
    allowed = {STREAMS: Allowance(2.0, 0.0)}
    monkeypatch.setattr("atomtrain.swarm.transport.direct.allowances", lambda _: allowed)
    greet, greeted = Direct._greeted, 0

    async def counted(self: Direct, plain: socket.socket) -> SecureChannel:
        nonlocal greeted
        greeted += 1
        channel = await greet(self, plain)
        assert isinstance(channel, SecureChannel)
        return channel

    monkeypatch.setattr(Direct, "_greeted", counted)

    async def scenario() -> None:
        served: list[str] = []

        async def handle(channel: Channel) -> None:
            served.append(channel.host)
            channel.close()

        async def ask(peer_id: str) -> bytes:
            return listening.offer("member").encode()

        listening = Direct("127.0.0.1", 0, 5.0, ask)
        with contextlib.closing(listening):
            listening.serve(handle)
            for _ in range(5 * HOST_TIMES):
                channel = await listening.open("listening", ["127.0.0.1"])
                assert channel is not None
                await channel.wait_closed(PATIENCE_S)
                channel.close()
            assert served == ["127.0.0.1"] * 5 * HOST_TIMES
            port = Offer.decode(await ask("")).port
            for _ in range(3 * HOST_TIMES):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                with contextlib.suppress(ConnectionError):
                    writer.write(bytes(48))  # a token that nobody has
                    assert await asyncio.wait_for(reader.read(1), PATIENCE_S) == b""
                writer.close()

    asyncio.run(scenario())
    assert greeted == (5 + 2) * HOST_TIMES


def test_hosts_of_addresses() -> None:
    assert host_of("/ip4/1.2.3.4/tcp/5/p2p/Q") == "1.2.3.4"
    assert host_of("/dns4/a.example/tcp/5/p2p/Q") == "a.example"
    for other in ("/ip4/1.2.3.4/udp/5/quic", "/ip4/1.2.3.4/tcp/5/p2p/Q/p2p-circuit", "", "x"):
        assert host_of(other) == ""


class FakeSocket:
    """Has sent so many segments, some of them more than once, and remembers its algorithm."""

    def __init__(self, sent: int = 0, resent: int = 0) -> None:
        self.info = bytearray(160)
        self.info[100:104], self.info[156:160] = (
            n.to_bytes(4, sys.byteorder) for n in (resent, sent)
        )
        self.algorithm = b""

    def getsockopt(self, *_: int) -> bytes:
        return bytes(self.info)

    def setsockopt(self, level: int, name: int, value: bytes) -> None:
        self.algorithm = value


def test_streams_to_whom_packets_got_lost_do_not_slow_down_for_that() -> None:
    congestion = Congestion()

    def chosen(peer_id: str) -> bytes:
        plain = FakeSocket()
        congestion.choose(plain, peer_id)  # type: ignore[arg-type]
        return plain.algorithm

    def ended(peer_id: str, **how: int) -> None:
        congestion.learn(FakeSocket(**how), peer_id)  # type: ignore[arg-type]

    assert chosen("far") == b"cubic"
    ended("far", sent=400, resent=8)
    assert chosen("far") == b"cubic", "too little to tell"
    ended("far", sent=400, resent=0)
    assert (chosen("far"), chosen("near")) == (b"bbr", b"cubic")
    ended("far", sent=10_000, resent=30)
    assert chosen("far") == b"bbr", "between the two bounds it stays"
    ended("far", sent=10_000, resent=3)
    assert chosen("far") == b"cubic"


def test_a_real_stream_tells_how_much_it_sent_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    with one, other:
        congestion = Congestion()
        congestion._lossy.add("peer")
        for _ in range(2 * 500):
            one.sendall(b"x")
            other.recv(1)
        congestion.learn(one, "peer")
        assert not congestion._lossy
    congestion.learn(one, "peer")  # closed: nothing is learnt
