"""Peers that nobody can dial: streams through relays, sealed from end to end, relays replaced."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from atombench.virtual.clock import run_virtual
from atomtrain.errors import ConfigError, SwarmError
from atomtrain.swarm.membership.config import relay_limit_of
from atomtrain.swarm.membership.records import LEFT, TRAINING
from atomtrain.swarm.transport.addresses import circuit_of, circuits_to, dialled, first_hop, through
from atomtrain.swarm.transport.identity import Identity
from atomtrain.swarm.transport.memory import channel_pair
from atomtrain.swarm.transport.messages import (
    AskDial,
    Call,
    Holding,
    HoldOn,
    Joined,
    Message,
    Ping,
    Pong,
    RelayTo,
    TakeCall,
)
from atomtrain.swarm.transport.relaying import Relay
from atomtrain.swarm.transport.sealed import SealedChannel, agree_as_called, agree_as_caller
from atomtrain.swarm.transport.transport import CHUNK_BYTES, Channel, LinkLost, PeerRefused
from tests.support.swarm_configs import swarm_config
from tests.support.swarm_virtual import SimulatedPeer, Simulation

KEYS = [Identity(bytes([n] * 32)) for n in range(1, 8)]
ALICE, BOB, MALLORY, *_ = KEYS


# Addresses


def test_addresses_through_relays() -> None:
    relay = f"/ip4/192.0.2.1/tcp/4001/p2p/{ALICE.peer_id}"
    address = through(relay, BOB.peer_id)
    assert circuit_of(address) == (ALICE.peer_id, relay, BOB.peer_id)
    assert (first_hop(address), first_hop(relay)) == (relay, relay)
    assert dialled([relay, address]) == (relay,)
    assert [one.relay_id for one in circuits_to(BOB.peer_id, [relay, address])] == [ALICE.peer_id]
    assert circuits_to(MALLORY.peer_id, [address]) == []
    for none in (relay, "", "/p2p-circuit/p2p/x", f"{relay}/p2p-circuit", through(address, "x")):
        assert circuit_of(none) is None


def test_limits_of_what_is_passed_on() -> None:
    assert relay_limit_of(None) == math.inf
    assert relay_limit_of("none") == 0
    assert relay_limit_of("8Mbit/s") == 1e6
    for wrong in ("0", "1kbit/s", "much"):
        with pytest.raises(ConfigError, match="relay-limit"):
            relay_limit_of(wrong)
    with pytest.raises(ConfigError, match="relay_limit_bytes_per_s"):
        swarm_config(run="r", relay_limit_bytes_per_s=10.0)


# Sealed streams


async def _sealed(
    caller: Identity = ALICE, called: Identity = BOB, said: str = ALICE.peer_id
) -> tuple[SealedChannel, SealedChannel]:
    one, other = channel_pair("relay", "relay", 5.0)
    greeting = asyncio.gather(
        agree_as_caller(one, caller, BOB.peer_id), agree_as_called(other, called, said)
    )
    return await asyncio.wait_for(greeting, 20)


def test_a_sealed_stream_carries_any_bytes_both_ways() -> None:
    async def scenario() -> None:
        one, other = await _sealed()
        assert (one.remote, other.remote, one.relay_id) == (BOB.peer_id, ALICE.peer_id, "relay")
        data = os.urandom(3 * CHUNK_BYTES + 17)

        async def receive(channel: Channel) -> bytes:
            whole = memoryview(bytearray(len(data)))
            for start in range(0, len(whole), 50_001):
                await channel.receive_into(whole[start : start + 50_001])
            return bytes(whole)

        _, _, came, went = await asyncio.gather(
            one.send_bytes(data), other.send_bytes(data), receive(one), receive(other)
        )
        assert came == went == data
        await one.send(Ping(bytes_count=3))
        assert await other.receive(Ping, 1.0) == Ping(bytes_count=3)
        with pytest.raises(LinkLost, match="in time"):
            await other.receive(Ping, 0.5)
        piece = memoryview(bytearray(4))
        await one.send_bytes(b"abcd")
        assert await other.receive_some(piece) == 4  # has no deadline, nor that of the last message
        await one.send(Ping(bytes_count=4))  # who gave up waiting may wait again
        assert await other.receive(Ping, 1.0) == Ping(bytes_count=4)
        other.close()
        with pytest.raises(LinkLost, match="closed"):
            await one.receive(Pong, 1.0)

    run_virtual(scenario)


@pytest.mark.parametrize(
    ("caller", "called", "said"),
    [(ALICE, MALLORY, ALICE), (MALLORY, BOB, ALICE), (ALICE, BOB, MALLORY)],
)
def test_nobody_stands_at_the_end_of_a_stream_for_another(
    caller: Identity, called: Identity, said: Identity
) -> None:
    async def scenario() -> None:
        with pytest.raises(LinkLost):
            await _sealed(caller, called, said.peer_id)

    run_virtual(scenario)


def _liar(key: Identity, name: str) -> Identity:
    """Return who signs with a key of its own, and says to be another."""
    liar = Identity(key.encode()[4:36])
    liar.peer_id = name
    return liar


@pytest.mark.parametrize(
    ("caller", "called", "why"),
    [
        (_liar(MALLORY, ALICE.peer_id), BOB, f"is not of {ALICE.peer_id[-8:]}"),
        (ALICE, _liar(MALLORY, BOB.peer_id), f"is not {BOB.peer_id[-8:]}"),
    ],
)
def test_each_end_checks_the_others_signature(caller: Identity, called: Identity, why: str) -> None:
    async def scenario() -> None:
        with pytest.raises(LinkLost, match=why):
            await _sealed(caller, called)

    run_virtual(scenario)


def _between(spoil: Callable[[bytearray], bytearray]) -> list[bytes]:
    """Have something between two ends change a frame; return all that was seen there."""
    seen: list[bytes] = []

    async def scenario() -> None:
        one, left = channel_pair("alice", "relay", 5.0)
        right, other = channel_pair("relay", "bob", 5.0)

        async def pump(source: Channel, sink: Channel) -> None:
            piece = memoryview(bytearray(CHUNK_BYTES))
            while count := await source.receive_some(piece):
                seen.append(bytes(piece[:count]))
                greeted = len(seen) > 2
                changed = bytes(piece[:count])
                await sink.send_bytes(spoil(bytearray(changed)) if greeted else changed)

        pumps = [asyncio.ensure_future(pump(left, right)), asyncio.ensure_future(pump(right, left))]
        ends = await asyncio.gather(
            agree_as_caller(one, ALICE, BOB.peer_id), agree_as_called(other, BOB, ALICE.peer_id)
        )
        await ends[0].send_bytes(b"a secret message")
        try:
            await ends[1].receive_into(memoryview(bytearray(32)))
        finally:
            for task in pumps:
                task.cancel()

    with pytest.raises(LinkLost, match=r"not sent by this peer|a frame of|nothing moved"):
        run_virtual(scenario)
    return seen


@pytest.mark.parametrize("index", [0, 3, 4, -1])
def test_who_is_between_can_neither_read_nor_change(index: int) -> None:
    def flip(data: bytearray) -> bytearray:
        data[index] ^= 1
        return data

    assert not any(b"secret" in piece for piece in _between(flip))


def test_what_was_sent_once_does_not_count_twice() -> None:
    _between(lambda data: data * 2)


# The relay


async def _held(relay: Relay, peer_id: str) -> tuple[Channel, asyncio.Task[None]]:
    theirs, mine = channel_pair(peer_id, "relay", 3.0)
    task = asyncio.create_task(relay.hold(mine))
    await asyncio.sleep(0.1)
    await theirs.receive_any(1.0)
    return theirs, task


async def _call(
    relay: Relay, held: Channel, said: RelayTo, caller: str = "caller"
) -> tuple[Channel, Channel, asyncio.Task[None]]:
    """Return the caller's end, the called end, and the task that passes on between them."""
    near, middle = channel_pair(caller, "relay", 3.0)
    passing = asyncio.create_task(relay.pass_on(middle, said))
    call = await held.receive(Call, 1.0)
    assert (call.caller, call.bulk) == (caller, said.bulk)
    far, taken = channel_pair(said.peer_id, "relay", 3.0)
    relay.take(taken, TakeCall(ticket=call.ticket))
    await near.receive(Joined, 1.0)
    return near, far, passing


def _on_clock(work: Callable[[], Awaitable[None]]) -> None:
    run_virtual(work)


def test_a_relay_passes_on_until_one_end_closes_and_forgets() -> None:
    async def scenario() -> None:
        relay = Relay(math.inf, lambda _: 2.0, 50.0)
        held, _ = await _held(relay, "b")
        near, far, passing = await _call(relay, held, RelayTo(peer_id="b", bulk=True))
        assert relay.status() == {"peers": ["b"], "streams": 1, "passed_bytes": 0}
        await near.send_bytes(b"x" * 100_000)
        await far.receive_into(memoryview(bytearray(100_000)))
        far.close()
        with pytest.raises(LinkLost, match="closed"):
            await near.receive_any(5.0)
        await passing
        assert relay.status() == {"peers": ["b"], "streams": 0, "passed_bytes": 100_000}

        near, far, passing = await _call(relay, held, RelayTo(peer_id="b", bulk=False))
        held.close()  # the called peer is gone: so are its streams
        with pytest.raises(LinkLost):
            await near.receive_any(5.0)
        assert not relay.holds("b")

    _on_clock(scenario)


def test_a_held_peer_that_comes_again_is_called_over_its_new_stream() -> None:
    async def scenario() -> None:
        relay = Relay(math.inf, lambda _: 2.0, 50.0)
        dead, first = await _held(relay, "b")
        alive, second = await _held(relay, "b")
        with pytest.raises(LinkLost, match="closed"):
            await dead.receive_any(1.0)
        await first
        near, far, _ = await _call(relay, alive, RelayTo(peer_id="b", bulk=False))
        await near.send(Ping(bytes_count=1))
        assert await far.receive(Ping, 1.0) == Ping(bytes_count=1)
        assert not second.done()

    _on_clock(scenario)


def test_a_called_peer_that_does_not_come_costs_the_deadline_and_strangers_take_no_calls() -> None:
    async def scenario() -> None:
        relay = Relay(math.inf, lambda _: 2.0, 50.0)
        held, _ = await _held(relay, "b")
        calling = asyncio.create_task(relay.call("b", "c", bulk=False))
        ticket = (await held.receive(Call, 1.0)).ticket
        _, stranger = channel_pair("m", "relay", 3.0)
        for peer, said in (("m", ticket), ("b", "another")):
            with pytest.raises(SwarmError, match="nobody waits"):
                relay.take(channel_pair(peer, "relay", 3.0)[1], TakeCall(ticket=said))
        with pytest.raises(LinkLost, match="in time"):
            await calling
        with pytest.raises(SwarmError, match="nobody waits"):
            relay.take(stranger, TakeCall(ticket=ticket))
        with pytest.raises(LinkLost, match="not held"):
            await relay.call("z", "c", bulk=False)

    _on_clock(scenario)


def test_what_is_passed_on_is_limited_and_silence_ends() -> None:
    async def scenario() -> None:
        relay, loop = Relay(10_000.0, lambda _: 2.0, 50.0), asyncio.get_running_loop()
        held, _ = await _held(relay, "b")
        near, far, passing = await _call(relay, held, RelayTo(peer_id="b", bulk=True))
        started_s = loop.time()
        sending = asyncio.gather(near.send_bytes(bytes(50_000)), far.send_bytes(bytes(50_000)))
        for end in (near, far):
            await end.receive_into(memoryview(bytearray(50_000)))
        await sending
        assert 9 < loop.time() - started_s < 11  # 100 kB at 10 kB/s
        with pytest.raises(LinkLost, match="nothing moved"):
            await passing

    _on_clock(scenario)


def test_a_held_peer_that_is_no_member_any_more_is_let_go() -> None:
    async def scenario() -> None:
        members = {"b"}
        relay = Relay(math.inf, lambda _: 2.0, 500.0, is_member=members.__contains__, look_s=6.0)
        held, task = await _held(relay, "b")
        near, _, _ = await _call(relay, held, RelayTo(peer_id="b", bulk=False))
        await asyncio.sleep(20)
        members.clear()  # its host has lost its power: nothing says that the stream is dead
        await asyncio.sleep(12)
        assert relay.holds("b"), "records may be late"
        members.add("b")
        await asyncio.sleep(20)
        members.clear()
        await asyncio.sleep(19)
        with pytest.raises(LinkLost, match="no member"):
            await task
        assert not relay.holds("b")
        with pytest.raises(LinkLost):
            await near.receive_any(5.0)

    _on_clock(scenario)


def test_what_a_relay_refuses() -> None:
    async def scenario() -> None:
        unwilling, relay = Relay(0.0, lambda _: 2.0, 50.0), Relay(math.inf, 2.0, 50.0)
        wish = HoldOn()
        assert "nobody" in unwilling.refusal("b", wish, can_be_dialled=True)
        assert "dial" in relay.refusal("b", wish, can_be_dialled=False)
        assert relay.refusal("b", wish, can_be_dialled=True) == ""
        to_b = RelayTo(peer_id="b", bulk=True)
        assert "does not relay" in relay.refusal("c", to_b, can_be_dialled=True)
        await _held(relay, "b")
        assert relay.refusal("c", to_b, can_be_dialled=False) == ""
        assert "does not relay" in relay.refusal("b", to_b, can_be_dialled=True)
        relay._passing["c"] = 64
        assert "as many" in relay.refusal("c", to_b, can_be_dialled=True)
        assert relay.refusal("d", to_b, can_be_dialled=True) == ""
        relay._passing.update({f"e{number}": 32 for number in range(6)})
        assert "as many" in relay.refusal("d", to_b, can_be_dialled=True)
        for number in range(200):
            relay._held[f"p{number}"] = relay._held["b"]
        assert "already" in relay.refusal("c", wish, can_be_dialled=True)

    _on_clock(scenario)


# Whole swarms


class Hidden(Simulation):
    """A swarm in which some cannot be dialled."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__((300, 200), seed)
        self.network.identities = {key.peer_id: key for key in KEYS}
        self.hidden: set[str] = set()
        self.network.hidden = self.hidden

    async def come(self, key: Identity, *, hidden: bool = False, **config: object) -> str:
        if hidden:
            self.hidden.add(key.peer_id)
        await self.add(key.peer_id, 0.5, **config)  # type: ignore[arg-type]
        return key.peer_id

    def peer(self, name: str) -> SimulatedPeer:
        return self.peers[name]

    async def averaged(self, *names: str, within_s: float = 120.0) -> None:
        """Wait until each of these has seen a new round of all of them."""
        before = {name: len(self.peer(name).reports) for name in names}
        async with asyncio.timeout(within_s):
            while not all(
                any(set(r.contributors) == set(names) for r in self.peer(n).reports[before[n] :])
                for n in names
            ):
                await asyncio.sleep(0.5)

    def relays_of(self, name: str) -> set[str]:
        addresses = self.peer(name).service.own_record().addresses
        return {one.relay_id for one in circuits_to(name, addresses)}

    async def relayed(self, by: set[str], *names: str, within_s: float = 60.0) -> None:
        """Wait until each of these is reached through these relays, and no others."""
        async with asyncio.timeout(within_s):
            while any(self.relays_of(name) != by for name in names):
                await asyncio.sleep(0.5)


def test_peers_that_cannot_dial_each_other_average_through_a_relay() -> None:
    async def scenario() -> None:
        swarm = Hidden()
        public = await swarm.come(KEYS[0])
        hidden = [await swarm.come(key, hidden=True) for key in KEYS[1:3]]
        await swarm.averaged(public, *hidden)
        await swarm.relayed({public}, *hidden)
        await swarm.relayed(set(), public)
        await asyncio.sleep(10)  # by then there is a new record of everybody
        relay = swarm.peer(public).service.context.routes.relay
        assert relay.passed_bytes > 0
        assert relay.status()["peers"] == sorted(hidden)
        shown = {p.peer_id: p.relays for p in swarm.peer(public).service.context.roster.statuses()}
        assert shown == {public: 0, hidden[0]: 1, hidden[1]: 1}
        # A newcomer that cannot be dialled, either: its donors may be those behind the relay.
        newcomer = await swarm.come(KEYS[3], hidden=True)
        await swarm.averaged(public, *hidden, newcomer)
        assert swarm.check_means() > 10

    run_virtual(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_relay_that_is_killed_is_replaced(seed: int) -> None:
    async def scenario() -> None:
        swarm = Hidden(seed)
        public = [await swarm.come(key) for key in KEYS[:2]]
        hidden = [await swarm.come(key, hidden=True) for key in KEYS[2:4]]
        await swarm.averaged(*public, *hidden)
        await swarm.kill(public[seed % 2])
        left = public[1 - seed % 2]
        await swarm.averaged(left, *hidden)
        third = await swarm.come(KEYS[4])
        await swarm.relayed({left, third}, *hidden)
        await swarm.kill(left)
        await swarm.averaged(third, *hidden)
        assert swarm.check_means() > 10

    run_virtual(scenario)


@pytest.mark.slow
def test_who_does_not_want_to_relay_does_not() -> None:
    async def scenario() -> None:
        swarm = Hidden()
        unwilling = await swarm.come(KEYS[0], relay_limit_bytes_per_s=0)
        hidden = [await swarm.come(key, hidden=True) for key in KEYS[1:3]]
        await asyncio.sleep(60)
        await swarm.relayed(set(), *hidden)
        for name in hidden:  # it still averages with those that it can be dialled by
            both = {unwilling, name}
            assert any(set(r.contributors) == both for r in swarm.peer(unwilling).reports)
        willing = await swarm.come(KEYS[3])
        await swarm.averaged(unwilling, willing, *hidden)
        await swarm.relayed({willing}, *hidden)

    run_virtual(scenario)


@pytest.mark.slow
def test_who_refuses_to_relay_is_not_asked_all_the_time() -> None:
    async def scenario() -> None:
        swarm = Hidden()
        unwilling = await swarm.come(KEYS[0], relay_limit_bytes_per_s=0)
        relay, asked = swarm.peer(unwilling).service.context.routes.relay, []
        refusal = relay.refusal

        def counted(remote: str, message: Message, *, can_be_dialled: bool) -> str:
            asked.extend([remote] if isinstance(message, HoldOn) else [])
            return refusal(remote, message, can_be_dialled=can_be_dialled)

        relay.refusal = counted  # type: ignore[method-assign]
        await swarm.come(KEYS[1], hidden=True)
        await asyncio.sleep(60)
        assert 2 <= len(asked) <= 6

    run_virtual(scenario)


def test_who_leaves_relays_for_nobody() -> None:
    async def scenario() -> None:
        swarm = Hidden()
        public, other = await swarm.come(KEYS[0]), await swarm.come(KEYS[1])
        await asyncio.sleep(20)
        for state, why in ((LEFT, "it leaves the run"), (TRAINING, "")):
            swarm.peer(public).service.state = state
            channel = await swarm.peer(other).service.context.open(public)
            await channel.send(HoldOn())
            if why:
                with pytest.raises(PeerRefused, match=why):
                    await channel.receive(Holding, 5.0)
            else:
                await channel.receive(Holding, 5.0)

    run_virtual(scenario)


def test_when_no_relay_leads_to_a_peer_it_is_dialled_again() -> None:
    async def scenario() -> None:
        swarm = Hidden()
        public = await swarm.come(KEYS[0])
        hidden, other = [await swarm.come(key, hidden=True) for key in KEYS[1:3]]
        await swarm.relayed({public}, hidden, other)
        await asyncio.sleep(10)
        context = swarm.peer(other).service.context
        straight = context.transport.open

        async def without_relay(peer_id: str, **how: Any) -> Channel:
            if peer_id == public:
                raise LinkLost("it is gone")
            return await straight(peer_id, **how)

        context.transport.open = without_relay  # type: ignore[method-assign]
        swarm.hidden.clear()
        context.routes._indirect_until_s[hidden] = math.inf  # as after a dial that failed
        with pytest.raises(LinkLost, match="gone"):
            await context.routes.open(hidden, bulk=False)
        assert (await context.routes.open(hidden, bulk=False)).remote == hidden

    run_virtual(scenario)


def test_who_some_cannot_dial_does_not_relay() -> None:
    async def scenario() -> None:
        swarm = Hidden()
        await swarm.come(KEYS[0])
        public = await swarm.come(KEYS[1])
        await asyncio.sleep(20)
        reach = swarm.peer(public).service._reach
        assert reach.can_be_dialled
        good = next(iter(reach._answers.values()))
        for said, reached in (
            ((True,), True),
            ((False,), False),
            ((True, False), False),
            ((True, True, False), True),  # one against two may lie
            ((True, True, True, False, False), False),
            ((None, None), False),
        ):
            reach._answers = {
                str(n): replace(good, answered=answered) for n, answered in enumerate(said)
            }
            assert reach.can_be_dialled is reached, said

    run_virtual(scenario)


@pytest.mark.slow
def test_one_that_lies_about_dialling_keeps_nobody_from_relaying() -> None:
    async def scenario() -> None:
        swarm = Hidden()
        public = [await swarm.come(key) for key in KEYS[:4]]
        liar = public[3]

        async def fails(_: str) -> bool:
            return False

        swarm.peer(liar).service.context.transport.answers = fails  # type: ignore[method-assign]
        hidden = [await swarm.come(key, hidden=True) for key in KEYS[4:6]]
        await asyncio.sleep(90)  # what was said before is asked again
        assert all(not swarm.relays_of(name) for name in public)
        assert all(swarm.peer(name).service._reach.can_be_dialled for name in public)
        await swarm.averaged(*public, *hidden)

    run_virtual(scenario)


@pytest.mark.slow
def test_who_can_be_dialled_again_needs_no_relay() -> None:
    async def scenario() -> None:
        swarm = Hidden()
        public = await swarm.come(KEYS[0])
        hidden = await swarm.come(KEYS[1], hidden=True)
        await swarm.relayed({public}, hidden)
        swarm.hidden.clear()  # its owner forwards the port
        await swarm.relayed(set(), hidden, within_s=200)
        await swarm.averaged(public, hidden)

    run_virtual(scenario)


def test_only_ones_own_address_is_dialled() -> None:
    async def scenario() -> None:
        swarm = Hidden()
        public, other = await swarm.come(KEYS[0]), await swarm.come(KEYS[1])
        context = swarm.peer(other).service.context
        for address in (f"memory/{public}", through(f"memory/{public}", other)):
            channel = await context.open(public)
            await channel.send(AskDial(address=address))
            with pytest.raises(LinkLost, match="closed"):
                await channel.receive_any(10.0)
        channel = await context.open(public)
        await channel.send(RelayTo(peer_id="nobody", bulk=False))
        with pytest.raises(PeerRefused, match="does not relay"):
            await channel.receive(Joined, 10.0)

    run_virtual(scenario)
