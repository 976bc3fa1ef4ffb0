"""What a member refuses of a round: a second contribution, and rounds that are not its leader's."""

from __future__ import annotations

import asyncio

import pytest
import torch
from msgspec.structs import replace

from atombench.virtual.clock import InlineThread, run_virtual
from atombench.virtual.network import unsigned, unverified
from atomtrain.errors import BadMessage
from atomtrain.swarm.anchors.anchors import Anchor, Origin, Snapshot
from atomtrain.swarm.anchors.stamps import Stamp
from atomtrain.swarm.catchup import donating
from atomtrain.swarm.catchup.donating import send_anchor
from atomtrain.swarm.codecs.codec import codec_named
from atomtrain.swarm.membership.config import PROTOCOL
from atomtrain.swarm.rounds.commitments import group_digest
from atomtrain.swarm.rounds.exchange import Exchange
from atomtrain.swarm.rounds.exchange_setup import ExchangeSetup
from atomtrain.swarm.transport.memory import channel_pair
from atomtrain.swarm.transport.messages import (
    OPENING_BYTES_MAX,
    AnchorHeader,
    AskAnchor,
    Begin,
    Contribution,
    Decline,
    Invite,
    Mean,
    Open,
    Ready,
    Refused,
)
from atomtrain.swarm.transport.transport import Channel, LinkLost
from tests.support.swarm_virtual import SimulatedPeer, Simulation

BEGIN = Begin(
    round_id="7-a-1", members=("a", "b"), weights=(4, 4), late=(False, False), exchange_s=20.0,
    bases=False, version=0, tokens=0, groups=1,
)  # fmt: skip


async def nobody(peer_id: str) -> Channel:
    raise AssertionError(f"{peer_id} was not to be called")


def opening(lane: int, begin: Begin = BEGIN) -> Contribution:
    """Return what b opens a lane with, that carries no slice of its own."""
    group = group_digest(begin)
    return Contribution(round_id=begin.round_id, lane=lane, group=group, commitments=())


def exchange_of_a(elements: int = 6, begin: Begin = BEGIN) -> Exchange:
    """Return a's part in the round."""
    anchor = Anchor(torch.zeros(elements), None, Stamp(0, 0, ""), Origin("", ()))
    snapshot = Snapshot(0, torch.ones(elements), anchor, weight=4, tokens_seen=4)
    setup = ExchangeSetup(
        peer_id="a", snapshot=snapshot, codec=codec_named("float32"), open=nobody,
        offload=InlineThread().offload, sign=unsigned, verify=unverified,
    )  # fmt: skip
    return Exchange(setup, begin)


def test_a_mean_of_who_has_no_weight_is_refused() -> None:
    async def scenario() -> None:
        exchange = exchange_of_a(begin=replace(BEGIN, weights=(4, 0)))
        theirs, mine = channel_pair("a", "b", 3.0)
        mean = Mean(contributors=(1,), digest="", shares=(), commitments=(), signature="")
        await mine.send(mean)
        with pytest.raises(BadMessage, match="cannot count"):
            await exchange._receive_mean(theirs, 1)

    run_virtual(scenario)


def test_who_contributed_already_is_refused() -> None:
    async def scenario() -> None:
        exchange = exchange_of_a()
        nothing = Contribution(
            round_id=BEGIN.round_id, lane=0, group=group_digest(BEGIN), commitments=()
        )
        _, first = channel_pair("b", "a", 3.0)
        serving = asyncio.create_task(exchange.serve(first, nothing))
        await asyncio.sleep(0.1)
        _, second = channel_pair("b", "a", 3.0)
        with pytest.raises(BadMessage, match="lane 0 is open already"):
            await exchange.serve(second, nothing)
        assert not serving.done(), "the first one still waits for its mean"
        serving.cancel()

    run_virtual(scenario)


def test_members_that_were_told_of_different_groups_exchange_nothing() -> None:
    """Else a leader that lies about weights would make an honest owner's mean look false."""

    async def scenario() -> None:
        exchange = exchange_of_a()
        _, channel = channel_pair("b", "a", 3.0)
        header = opening(0, replace(BEGIN, weights=(4, 8)))
        with pytest.raises(BadMessage, match="another group"):
            await exchange.serve(channel, header)

    run_virtual(scenario)


@pytest.mark.parametrize(
    ("caller", "lane", "why"),
    [("c", 0, "not in this round"), ("a", 0, "not in this round"), ("b", 99, "no lane 99")],
)
def test_who_does_not_belong_to_the_exchange_is_refused(caller: str, lane: int, why: str) -> None:
    async def scenario() -> None:
        _, channel = channel_pair(caller, "a", 3.0)
        wrong = Contribution(
            round_id=BEGIN.round_id, lane=lane, group=group_digest(BEGIN), commitments=()
        )
        with pytest.raises(BadMessage, match=why):
            await exchange_of_a().serve(channel, wrong)

    run_virtual(scenario)


async def idle_pair() -> SimulatedPeer:
    """Return a peer that knows another one, `b`; neither of them has anything to average."""
    simulation = Simulation((8,), seed=1)
    for name in ("a", "b"):
        (await simulation.add(name, step_s=0.5)).training = False
    await asyncio.sleep(10)
    peer = simulation.peers["a"]
    assert peer.service.context.roster.sees("b")
    return peer


def invited(peer: SimulatedPeer) -> tuple[Invite, Channel, asyncio.Task[bool]]:
    """Invite a peer in b's name; return the invitation, b's end of the stream, and its answer."""
    index = peer.service.context.agenda.next_round
    invite = Invite(
        round_id=f"{index}-b-1", round_index=index, version=0, slack=0, answer_s=4.0,
        fragment=peer.service.context.agenda.fragment(index),
    )  # fmt: skip
    leader, member = channel_pair("b", "a", 3.0)
    return invite, leader, asyncio.create_task(peer.service._rounds.follow(member, invite))


def test_a_round_with_the_id_of_another_leader_is_declined() -> None:
    async def scenario() -> None:
        peer = await idle_pair()
        index = peer.service.context.agenda.next_round
        for round_id in (f"{index}-c-1", f"{index + 1}-b-1", f"{index}-xb-1", "b"):
            leader, member = channel_pair("b", "a", 3.0)
            invite = Invite(
                round_id=round_id, round_index=index, fragment=0, version=0, slack=0, answer_s=4.0
            )
            assert await peer.service._rounds.follow(member, invite), "the last word was a's"
            declined = await leader.receive(Decline, 1.0)
            assert declined.reason == "that is not the id of a round that it leads"

    run_virtual(scenario)


@pytest.mark.parametrize("its_own", [True, False])
def test_a_leader_begins_the_round_that_it_called_to(its_own: bool) -> None:
    async def scenario() -> None:
        peer = await idle_pair()
        invite, leader, following = invited(peer)
        ready = await leader.receive(Ready, 3.0)
        begin = replace(
            BEGIN, round_id=invite.round_id if its_own else f"{invite.round_index}-b-2",
            weights=(ready.weight, 0), exchange_s=2.0, version=ready.version, tokens=ready.tokens,
        )  # fmt: skip
        await leader.send(begin)
        assert not await following
        await asyncio.sleep(2)  # the next boundary takes the report
        began_another = "the leader began another round"
        assert [report.outcome for report in peer.reports[-1:]] == ["abandoned"]
        assert (peer.reports[-1].reason == began_another) is not its_own

    run_virtual(scenario)


@pytest.mark.parametrize("first", [True, False])
def test_what_opens_a_stream_is_short(first: bool) -> None:
    """Anybody may open streams, and keep back the last byte of each: so none may hold much."""

    async def scenario() -> None:
        peer = await idle_pair()
        channel = await peer.simulation.network.transports["b"].open("a")
        if not first:
            await channel.send(Open(protocol=PROTOCOL, run="sim", proof=""))
        await channel.send_bytes((OPENING_BYTES_MAX + 1).to_bytes(4, "big"))
        if first:  # as a peer of another version might: it is told so
            refused = await channel.receive_any(1.0)
            assert isinstance(refused, Refused)
            assert "announced" in refused.reason
            return
        with pytest.raises(LinkLost, match="closed"):
            await channel.receive_any(1.0)

    run_virtual(scenario)


def test_an_anchor_is_on_its_way_to_a_peer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that is on its way stays in memory, however old it is by then."""
    begun, ended = 0, 0

    async def slowly(channel: Channel, ask: AskAnchor, anchor: Anchor) -> None:
        nonlocal begun, ended
        begun += 1
        await send_anchor(channel, ask, anchor)
        await asyncio.sleep(3.0)
        ended += 1

    monkeypatch.setattr(donating, "send_anchor", slowly)

    async def scenario() -> None:
        nonlocal begun, ended
        simulation = (await idle_pair()).simulation
        transport = simulation.network.transports["b"]
        begun = ended = 0  # b has fetched one
        for _ in range(20):
            channel = await transport.open("a")
            await channel.send(Open(protocol=PROTOCOL, run="sim", proof=""))
            await channel.send(AskAnchor(fragment=0, digest="", start_bytes=0))
            await asyncio.sleep(0.1)
        assert begun == 20
        going = simulation.peers["a"].service._donations._going
        assert [len(to) for to in going.values()] == [1]
        await asyncio.sleep(10)
        assert not going
        assert ended == 1
        channel = await transport.open("a")
        await channel.send(Open(protocol=PROTOCOL, run="sim", proof=""))
        await channel.send(AskAnchor(fragment=0, digest="", start_bytes=0))
        await channel.receive(AnchorHeader, 1.0)

    run_virtual(scenario)
