"""Messages, records, streams and the leader: random schedules and garbage."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atombench.virtual.clock import run_virtual
from atombench.virtual.network import MemoryTransport
from atomtrain.errors import BadMessage, SwarmError
from atomtrain.swarm.anchors.stamps import Stamp
from atomtrain.swarm.membership.config import PROTOCOL
from atomtrain.swarm.membership.records import PeerRecord
from atomtrain.swarm.rounds.leader_state import LeaderRound, Phase, RoundCall
from atomtrain.swarm.transport import messages
from atomtrain.swarm.transport.memory import channel_pair
from atomtrain.swarm.transport.messages import (
    Abandon,
    AskAnchor,
    Begin,
    Commit,
    Decline,
    Held,
    Message,
    Open,
    Ready,
)
from atomtrain.swarm.transport.transport import Inbox, LinkLost, PeerRefused
from tests.support.swarm_virtual import Simulation


@given(st.binary(max_size=300))
def test_garbage_is_no_message(data: bytes) -> None:
    with pytest.raises(BadMessage):
        messages.decode(data)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(BadMessage):
        messages.decode(b"[" * 100_000)


@given(st.binary(max_size=200) | _JSON.map(lambda body: json.dumps(body).encode()))
def test_garbage_is_no_record(data: bytes) -> None:
    with pytest.raises(BadMessage):
        PeerRecord.decode("p", data, 2)


def test_record_round_trip_and_impostor() -> None:
    record = PeerRecord(
        peer_id="p", manifest="m", name="n", state="training", sequence=1.5, addresses=("a",),
        next_round=3, steps=4, tokens=5, tokens_per_s=6.0, step_s=0.1, round_s=0.2,
        free_bytes_per_s=7.0, fetch_bytes_per_s=8.0, stamps=(Stamp(1, 2, "0d" * 16), None),
    )  # fmt: skip
    assert PeerRecord.decode("p", record.encode(), 2) == record
    for peer_id, count in (("q", 2), ("p", 3)):
        with pytest.raises(BadMessage):
            PeerRecord.decode(peer_id, record.encode(), count)


@given(st.binary(max_size=400))
def test_garbage_on_a_stream_ends_it(data: bytes) -> None:
    async def scenario() -> None:
        mine, theirs = channel_pair("me", "them", stall_s=1.0)
        await theirs.send_bytes(data)
        theirs.close()
        for _ in range(len(data) + 1):
            try:
                await mine.receive_any(1.0)
            except (LinkLost, BadMessage):
                return
        raise AssertionError("more messages than bytes")

    run_virtual(scenario)


def test_streams_have_deadlines_and_notice_the_end() -> None:
    async def scenario() -> None:
        mine, theirs = channel_pair("me", "them", stall_s=1.0)
        with pytest.raises(LinkLost, match="in time"):
            await mine.receive(Open, within_s=3.0)
        await theirs.send(AskAnchor(fragment=3, digest="", start_bytes=0))
        assert await mine.receive(AskAnchor, 1.0) == AskAnchor(fragment=3, digest="", start_bytes=0)
        await theirs.send(AskAnchor(fragment=3, digest="", start_bytes=0))
        with pytest.raises(BadMessage, match="not Open"):
            await mine.receive(Open, 1.0)
        inbox = Inbox(mine)
        await theirs.send(AskAnchor(fragment=4, digest="", start_bytes=0))
        theirs.close()
        assert await inbox.get(1.0) == AskAnchor(fragment=4, digest="", start_bytes=0)
        for _ in range(2):
            with pytest.raises(LinkLost, match="closed"):
                await inbox.get(1.0)

    run_virtual(scenario)


def test_another_version_is_told_so_whatever_it_begins_with() -> None:
    async def scenario() -> None:
        simulation = Simulation((40,), seed=9)
        await simulation.add("a", step_s=0.4)
        stranger = MemoryTransport(simulation.network, "old")
        for opening in (b'{"kind": "Open", "protocol": 1, "run": "sim"}', b"what?"):
            channel = await stranger.open("a")
            await channel.send_bytes(len(opening).to_bytes(4, "big") + opening)
            with pytest.raises(PeerRefused) as caught:
                await channel.receive(Open, 5.0)
            assert caught.value.answer.protocol == PROTOCOL

    run_virtual(scenario)


def test_donor_that_breaks_off_is_replaced() -> None:
    async def scenario() -> None:
        simulation = Simulation((40, 40), seed=9)
        for name in ("a", "b"):
            await simulation.add(name, step_s=0.4)
        await asyncio.sleep(10)
        late = await simulation.add("c", step_s=0.4)
        donors = late.service.context.roster.holders(0)
        assert [donor.peer_id for donor in donors] == ["a", "b"]
        fetching = asyncio.ensure_future(late.service.fetch(0, 10.0))
        await asyncio.sleep(0.03)
        assert not fetching.done()
        await simulation.kill(donors[0].peer_id)
        anchor = await fetching
        assert anchor.stamp.version > 0
        await simulation.kill(donors[1].peer_id)
        with pytest.raises(SwarmError, match="could not be fetched"):
            await late.service.fetch(0, 5.0)

    run_virtual(scenario)


def _call() -> RoundCall:
    return RoundCall(
        round_id="3-x", round_index=3, fragment=1, version=0, answer_s=10.0,
        exchange_s=lambda group, bases: 5.0 * group,
        slices_each=lambda group: 2 // (group - 1) or 1, decision_s=5.0,
    )  # fmt: skip


@settings(max_examples=2000, deadline=None)
@given(st.integers(0, 10**9))
def test_leader_under_any_schedule(seed: int) -> None:
    """It always ends by its deadlines; who is told to commit held every committed slice alike."""
    rng = random.Random(seed)
    members = [f"m{i}" for i in range(rng.randint(1, 5))]
    leader = LeaderRound(_call(), members, now_s=0.0)
    assert [to for to, _ in leader.start()] == members
    said: dict[str, Message] = {}
    now_s = 0.0
    while leader.phase is not Phase.DONE:
        assert now_s <= 10.0 + 25.0 + 5.0 + 10.0, "the deadlines have passed"
        act = rng.choices(["fits", "junk", "decline", "lost", "tick"], [12, 1, 1, 1, 1])[0]
        member = rng.choice(members)
        if act == "tick":
            now_s += rng.uniform(1.0, 10.0)
            out = leader.on_tick(now_s)
        elif act == "lost":
            out = leader.on_lost(member, now_s)
        else:
            message = _message(rng, act, leader)
            if isinstance(message, Held) and member in leader._waiting:
                said[member] = message
            out = leader.on_message(member, message, now_s)
        _check_decision(leader, out, said)


@pytest.mark.parametrize("tied", ["0", "z"])
def test_of_anchors_that_tie_the_one_of_most_members_counts(tied: str) -> None:
    """Whatever their hashes: anybody finds a lower one."""
    leader = LeaderRound(_call(), ["a", "b", "c", "liar"], now_s=0.0)
    out: list[tuple[str, Message]] = []
    for member in ("a", "b", "c", "liar"):
        digest = tied if member == "liar" else "x"
        ready = Ready(version=1, tokens=7, digest=digest, weight=1, late=False)
        out += leader.on_message(member, ready, 1.0)
    assert leader.group == ("a", "b", "c")
    assert [type(said) for to, said in out if to == "liar"] == [Abandon]
    two = LeaderRound(_call(), ["a", "b", "more"], now_s=0.0)
    for member in ("a", "b", "more"):
        tokens = 8 if member == "more" else 7
        ready = Ready(version=1, tokens=tokens, digest="x", weight=1, late=False)
        out = two.on_message(member, ready, 1.0)
    assert not two.group, "more tokens are no tie"


def _message(rng: random.Random, act: str, leader: LeaderRound) -> Message:
    if act == "junk":
        return Abandon(reason="junk")
    if act == "decline":
        return Decline(reason="no", round_index=9)
    if leader.phase is Phase.FORMING:
        digest = rng.choices("xy", [5, 1])[0]
        return Ready(version=1, tokens=7, digest=digest, weight=rng.randint(0, 2), late=False)
    digests = (
        rng.choices(["h", "k", ""], [8, 1, 1])[0]
        for _ in leader.group * leader.call.slices_each(len(leader.group))
    )
    return Held(digests=tuple(digests))


def _check_decision(leader: LeaderRound, out: list[tuple[str, Message]], said: Any) -> None:
    begins = [m for _, m in out if isinstance(m, Begin)]
    if begins:
        assert len(leader.group) >= 2
        assert [to for to, m in out if isinstance(m, Begin)] == list(leader.group)
        assert any(begins[0].weights)
        assert len({leader._ready[m].digest for m in leader.group}) == 1
    for to, message in out:
        if isinstance(message, Commit):
            assert to in leader.group
            assert message.slices
            for j in message.slices:
                held = {said[member].digests[j] for member, m in out if isinstance(m, Commit)}
                assert len(held) == 1
                assert "" not in held
