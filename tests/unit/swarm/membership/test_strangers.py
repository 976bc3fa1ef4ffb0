"""What a stranger can say at most, and what is let go of when a stream comes to nothing."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import weakref

import pytest
import torch

from atombench.virtual.clock import run_virtual
from atomtrain.cli.parsing import complain
from atomtrain.errors import BadMessage, SwarmError
from atomtrain.swarm.anchors.anchors import Anchor
from atomtrain.swarm.anchors.stamps import Stamp
from atomtrain.swarm.catchup.donating import Donations
from atomtrain.swarm.membership import roster
from atomtrain.swarm.membership.admission import Admission
from atomtrain.swarm.membership.records import LEFT, PeerRecord
from atomtrain.swarm.membership.roster import Roster
from atomtrain.swarm.node.network_thread import Tasks
from atomtrain.swarm.rounds.leader_io import SAID_MAX, LeaderIO
from atomtrain.swarm.transport import direct
from atomtrain.swarm.transport.addresses import circuits_to, place_of
from atomtrain.swarm.transport.direct import Direct
from atomtrain.swarm.transport.memory import channel_pair
from atomtrain.swarm.transport.messages import (
    AnchorHeader,
    AskAnchor,
    AskDial,
    Call,
    Commit,
    HoldOn,
    Invite,
    Message,
    Open,
    Pong,
    Ready,
    TakeCall,
    decode,
)
from atomtrain.swarm.transport.relaying import Relay
from atomtrain.swarm.transport.transport import Channel, LinkLost, begun
from tests.unit.swarm.membership.test_membership import ALICE, MALLORY, record_of
from tests.unit.swarm.transport.test_relays import KEYS, Hidden

# Texts


@pytest.mark.parametrize("host", ["", "a..b", "x" * 64, "a\x00b", "a\x1b[31m", "a\ud800"])
def test_a_host_that_no_resolver_can_be_asked_for_is_no_place(host: str) -> None:
    with pytest.raises(SwarmError, match="is not the address of a peer"):
        place_of(f"/dns4/{host}/tcp/4001/p2p/{ALICE.peer_id}")


def test_hosts_and_ports_of_places() -> None:
    for host in ("example.org", "a-b_c.example", "bücher.example", "10.0.0.1"):
        assert place_of(f"/dns4/{host}/tcp/65535/p2p/{ALICE.peer_id}").host == host
    for port in ("0", "65536", "9" * 5000, "-1", "x"):
        with pytest.raises(SwarmError, match="is not the address of a peer"):
            place_of(f"/ip4/10.0.0.1/tcp/{port}/p2p/{ALICE.peer_id}")


def test_halves_of_characters_are_no_text() -> None:
    with pytest.raises(BadMessage, match="not a message"):
        decode(b'{"kind": "Open", "protocol": 1, "run": "r", "proof": "\\ud800"}')
    body = json.loads(record_of(ALICE).encode())
    body["name"] = "\ud800"
    with pytest.raises(BadMessage, match="cannot be read"):
        PeerRecord.decode(ALICE.peer_id, json.dumps(body).encode(), 2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("protocol", -1), ("protocol", 2**53 + 1), ("protocol", 2**70), ("protocol", 1.0),
        ("protocol", True), ("protocol", "1"), ("protocol", None), ("protocol", [1]),
        ("run", "x" * 4097), ("run", 1), ("run", None), ("run", ["r"]), ("more", 1),
        ("kind", "Nothing"), ("kind", "Message"), ("kind", 1), ("kind", None), ("kind", ["Open"]),
    ],
)  # fmt: skip
def test_what_a_field_may_not_be(field: str, value: object) -> None:
    body: dict[str, object] = {"kind": "Open", "protocol": 2**53, "run": "x" * 4096, "proof": ""}
    assert decode(json.dumps(body).encode()) == Open(protocol=2**53, run="x" * 4096, proof="")
    with pytest.raises(BadMessage):
        decode(json.dumps({**body, field: value}).encode())
    for name in body:
        with pytest.raises(BadMessage):
            decode(json.dumps({k: v for k, v in body.items() if k != name}).encode())


@pytest.mark.parametrize("time_s", [-1e-9, 2.0**53 + 2, float("nan"), float("inf"), True, "1"])
def test_what_a_time_may_not_be(time_s: object) -> None:
    body = {"kind": "Pong", "time_s": 1, "version": "v", "bytes_count": 0}
    assert decode(json.dumps(body).encode()) == Pong(time_s=1.0, version="v", bytes_count=0)
    with pytest.raises(BadMessage):
        decode(json.dumps({**body, "time_s": time_s}).encode())


@pytest.mark.parametrize("slices", [[0] * 4097, [-1], [[0]], [True], [0.0], "0", {}, 0])
def test_what_a_list_may_not_be(slices: object) -> None:
    body = {"kind": "Commit", "slices": [0] * 4096, "absent": []}
    assert decode(json.dumps(body).encode()) == Commit(slices=(0,) * 4096, absent=())
    with pytest.raises(BadMessage):
        decode(json.dumps({**body, "slices": slices}).encode())


def test_what_is_wrong_is_told_in_a_few_words() -> None:
    strange = {f"{number}" + "x" * 9000: 1 for number in range(60)}
    with pytest.raises(BadMessage) as caught:
        decode(json.dumps({"kind": "HoldOn", **strange}).encode())
    assert len(str(caught.value)) < 2000


def test_what_others_say_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    complain("peer said \x1b[2J\x07 and\nmore")
    assert capsys.readouterr().err == "atom: peer said ?[2J? and more\n"


# Memory


def test_peers_that_are_gone_are_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "_GONE_MAX", 2)
    known = Roster(Admission("run", "me"), 2, "m")
    there = {MALLORY.peer_id: record_of(MALLORY).encode()}
    for key in KEYS[:5]:
        known.update({key.peer_id: record_of(key).encode(), **there})
        known.suspect(key.peer_id)
    known.update(there)
    assert set(known.addresses) == {MALLORY.peer_id, KEYS[3].peer_id, KEYS[4].peer_id}
    assert set(known._suspects) == {KEYS[3].peer_id, KEYS[4].peer_id}
    for key in KEYS[:5]:
        known.update({key.peer_id: record_of(key, 2.0, state=LEFT).encode()})
    assert len(known._left) == 2
    known.update({})
    assert known.all_left


# Streams that come to nothing


class Stuck(Channel):
    """A stream that takes nothing, and gives nothing."""

    closed = False

    async def _write(self, view: memoryview) -> None:
        await asyncio.get_running_loop().create_future()

    async def _read_into(self, view: memoryview) -> int:
        await asyncio.get_running_loop().create_future()
        return 0

    def close(self) -> None:
        self.closed = True


def anchor_of(version: int) -> Anchor:
    return Anchor(torch.zeros(1000), None, Stamp(version, 10 * version, f"{version:032x}"))


def ask_for(fragment: int) -> AskAnchor:
    return AskAnchor(fragment=fragment, digest="", start_bytes=0)


def test_who_asks_for_a_fragment_again_and_again_has_one_anchor_kept() -> None:
    donations, ended = Donations(), list[int]()
    kept: list[weakref.ref[Anchor]] = []

    async def serve(version: int) -> None:
        anchor = anchor_of(version)
        kept.append(weakref.ref(anchor))
        try:
            await donations.send(Stuck(f"peer{version % 2}", 60.0), ask_for(0), anchor)
        except (TimeoutError, LinkLost):
            ended.append(version)

    async def scenario() -> None:
        serving = []
        for version in range(20):
            serving.append(asyncio.ensure_future(serve(version)))
            await asyncio.sleep(0.1)
        assert ended == list(range(18))
        gc.collect()
        assert [one() is None for one in kept] == [True] * 18 + [False] * 2
        await asyncio.gather(*serving)
        assert not donations._going

    run_virtual(scenario)


def test_a_peer_is_sent_a_few_fragments_at_once() -> None:
    async def scenario() -> None:
        donations, anchor = Donations(), anchor_of(1)
        sendings = [
            asyncio.ensure_future(donations.send(Stuck("b", 60.0), ask_for(fragment), anchor))
            for fragment in range(8)
        ]
        await asyncio.sleep(0.1)
        with pytest.raises(BadMessage, match="as many anchors"):
            await donations.send(Stuck("b", 60.0), ask_for(8), anchor)
        mine, theirs = channel_pair("me", "c", stall_s=60.0)
        await donations.send(theirs, ask_for(8), anchor)
        assert (await mine.receive(AnchorHeader, 1.0)).digest == anchor.stamp.digest
        assert not any(one.done() for one in sendings)

    run_virtual(scenario)


def test_a_new_stream_that_takes_nothing_is_closed() -> None:
    async def scenario() -> None:
        stuck = Stuck("b", 3.0)
        with pytest.raises(LinkLost, match="in time"):
            await begun(stuck, HoldOn())
        assert stuck.closed
        given_up = Stuck("b", 30.0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await begun(given_up, HoldOn())
        assert given_up.closed

    run_virtual(scenario)


@pytest.mark.slow
def test_no_stream_to_a_member_or_its_relay_is_left_open() -> None:
    async def scenario() -> None:
        swarm = Hidden()
        public = await swarm.come(KEYS[0])
        hidden = [await swarm.come(key, hidden=True) for key in KEYS[1:3]]
        await swarm.relayed({public}, *hidden)
        await asyncio.sleep(10)  # by then there is a new record of everybody
        context = swarm.peer(hidden[0]).service.context
        opened: list[Stuck] = []

        async def open_stuck(peer_id: str, **_: object) -> Channel:
            opened.append(Stuck(peer_id, 3.0))
            return opened[-1]

        working, context.transport.open = context.transport.open, open_stuck
        for peer_id in (public, hidden[1]):
            with pytest.raises(LinkLost):
                await context.open(peer_id)
        context.transport.open = working
        await asyncio.sleep(60)  # others of this peer's tasks have had theirs, too
        assert {public, hidden[1]} <= {one.remote for one in opened}
        assert all(one.closed for one in opened)

    run_virtual(scenario)


def test_a_stream_that_came_while_nobody_waited_any_more_is_closed() -> None:
    class Full(Stuck):
        said: Message | None = None

        async def send(self, message: Message) -> None:
            self.said = message
            await asyncio.sleep(100)

    async def scenario() -> None:
        relay, full = Relay(1e9, lambda _: 2.0, 50.0), Full("b", 5.0)
        theirs, mine = channel_pair("b", "relay", 5.0)
        holding = asyncio.create_task(relay.hold(mine))
        await asyncio.sleep(0.1)
        relay._held["b"].channel = full
        calling = asyncio.create_task(relay.call("b", "c", bulk=False))
        await asyncio.sleep(1)
        assert isinstance(full.said, Call)
        taken = Stuck("b", 5.0)
        relay.take(taken, TakeCall(ticket=full.said.ticket))
        with pytest.raises(LinkLost, match="in time"):
            await calling
        assert taken.closed
        theirs.close()
        await holding

    run_virtual(scenario)


def test_tasks_that_others_start_at_their_end_are_cancelled_too() -> None:
    async def scenario() -> None:
        tasks = Tasks("me")
        ended: list[str] = []

        async def wait(name: str) -> None:
            try:
                await asyncio.sleep(1000)
            finally:
                ended.append(name)

        async def first() -> None:
            try:
                await wait("first")
            finally:
                tasks.spawn(wait("second"), "second")
                await asyncio.sleep(0)

        task = tasks.spawn(first(), "first")
        task.add_done_callback(lambda _: tasks.spawn(wait("third"), "third"))
        await asyncio.sleep(1)
        await tasks.cancel_all()
        assert "second" in ended
        assert len(asyncio.all_tasks()) == 1

    run_virtual(scenario)


def test_the_listener_outlives_a_lack_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_ACCEPT_AGAIN_S", 0.01)

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        accept, failures = loop.sock_accept, iter([errno.EMFILE, errno.ENFILE])

        async def scarce(listener):  # type: ignore[no-untyped-def]
            for code in failures:
                raise OSError(code, "Too many open files")
            return await accept(listener)

        monkeypatch.setattr(loop, "sock_accept", scarce)
        served: list[str] = []

        async def ask(peer_id: str) -> bytes:
            return listening.offer("caller").encode()

        async def handle(channel: Channel) -> None:
            served.append(channel.remote)
            channel.close()

        listening = Direct("127.0.0.1", 0, 5.0, ask)
        listening.serve(handle)
        channel = await listening.open("called", ["127.0.0.1"])
        assert channel is not None
        await channel.wait_closed(5.0)
        channel.close()
        listening.close()
        assert served == ["caller"]

    asyncio.run(scenario())


def test_one_peer_has_so_many_streams_and_no_more() -> None:
    async def scenario() -> None:
        swarm = Hidden()
        public, other = await swarm.come(KEYS[0]), await swarm.come(KEYS[1])
        transport = swarm.peer(other).service.context.transport
        streams = [await transport.open(public) for _ in range(140)]  # and says nothing
        await asyncio.sleep(1)
        ended = await asyncio.gather(*(one.wait_closed(1.0) for one in streams[-8:]))
        assert len(ended) == 8
        served = swarm.peer(public).service._streams
        assert served[other] <= 128 + 3
        for one in streams:
            one.close()
        await asyncio.sleep(5)
        assert served[other] <= 3, "a stream that has ended does not count"

    run_virtual(scenario)


def test_a_member_that_talks_on_and_on_is_not_listened_to() -> None:
    async def scenario() -> None:
        swarm = Hidden()
        context = swarm.peer(await swarm.come(KEYS[0])).service.context
        await asyncio.sleep(5)
        mine, theirs = channel_pair("leader", "talker", 5.0)

        async def open_to(peer_id: str) -> Channel:
            return mine

        leader = LeaderIO(context, context.agenda.next_round, open_to)
        for _ in range(50):
            await theirs.send(Ready(version=0, tokens=0, digest="", weight=1, late=False))
        invite = Invite(round_id="r", round_index=0, fragment=0, version=0, slack=0, answer_s=1.0)
        await leader._talk("talker", invite)
        said = [leader._events.get_nowait()[1] for _ in range(leader._events.qsize())]
        assert [isinstance(message, Ready) for message in said] == [True] * SAID_MAX + [False]
        assert said[-1] is None, "it is lost"

    run_virtual(scenario)


# Relays and dialling


def test_a_relay_whose_address_no_record_can_hold_is_none() -> None:
    async def scenario() -> None:
        swarm = Hidden()
        wordy, public = await swarm.come(KEYS[0]), await swarm.come(KEYS[1])
        swarm.peer(wordy).service.context.transport.address = f"memory/{'x' * 440}/{wordy}"
        await asyncio.sleep(10)
        hidden = await swarm.come(KEYS[2], hidden=True)
        await swarm.relayed({public}, hidden)
        await asyncio.sleep(20)
        for other in (wordy, public):
            record = next(
                one
                for one in swarm.peer(other).service.context.roster.others
                if one.peer_id == hidden
            )
            assert [one.relay_id for one in circuits_to(hidden, record.addresses)] == [public]

    run_virtual(scenario)


def test_who_asks_to_be_dialled_is_dialled_once_at_a_time() -> None:
    async def scenario() -> None:
        swarm = Hidden()
        public, other = await swarm.come(KEYS[0]), await swarm.come(KEYS[1])
        await asyncio.sleep(10)
        dialled: list[str] = []

        async def slow(address: str, within_s: float) -> bool:
            dialled.append(address)
            await asyncio.sleep(5)
            return True

        swarm.peer(public).service.context.transport.answers = slow  # type: ignore[method-assign]
        context = swarm.peer(other).service.context

        async def ask() -> Channel:
            channel = await context.open(public)
            await channel.send(AskDial(address=f"memory/{other}"))
            return channel

        first = await ask()
        await asyncio.sleep(1)
        second = await ask()
        with pytest.raises(LinkLost, match="closed"):
            await second.receive_any(2.0)
        assert len(dialled) == 1
        await first.receive_any(10.0)
        third = await ask()
        await third.receive_any(10.0)
        assert len(dialled) == 2

    run_virtual(scenario)
