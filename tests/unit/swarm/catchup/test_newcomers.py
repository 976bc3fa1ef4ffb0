"""A newcomer that joins through a liar: it ends on the honest anchor, or says it could not tell."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atombench.virtual.clock import run_virtual
from atomtrain.swarm.anchors.anchors import Anchor, digest_of
from atomtrain.swarm.anchors.stamps import Stamp
from atomtrain.swarm.catchup import vouching
from atomtrain.swarm.membership.admission import Admission
from atomtrain.swarm.membership.records import PeerRecord
from atomtrain.swarm.transport.messages import AskAnchor, AskKnown, Message
from atomtrain.swarm.transport.transport import Channel
from tests.support.swarm_virtual import SimulatedPeer, Simulation

HONEST, LIARS = ("a", "b", "c"), ("liar", "accomplice")
NEWCOMERS = 20


def forged(anchor: Anchor, versions: int = 0, *, values: torch.Tensor | None = None) -> Anchor:
    """Return another anchor than `anchor`, that claims so many versions and tokens more."""
    values = torch.randn(anchor.values.shape) if values is None else values
    stamp = Stamp(
        anchor.stamp.version + versions,
        anchor.stamp.tokens + 30 * versions,
        digest_of(values, anchor.velocity),
    )
    return Anchor(values, anchor.velocity, stamp)


def random_values(anchor: Anchor) -> Anchor:
    return forged(anchor)


def one_version_more(anchor: Anchor) -> Anchor:
    return forged(anchor, 1)


def honest_values_but_a_version_more(anchor: Anchor) -> Anchor:
    return forged(anchor, 1, values=anchor.values)


def not_a_number(anchor: Anchor) -> Anchor:
    return forged(anchor, 1, values=torch.full_like(anchor.values, float("nan")))


def the_lower_hash(anchor: Anchor) -> Anchor:
    while (false := forged(anchor)).stamp.digest >= anchor.stamp.digest:
        pass
    return false


def other_bytes(anchor: Anchor) -> Anchor:
    """The stamp is the right one, which others have; the bytes are not."""
    return Anchor(torch.randn(anchor.values.shape), anchor.velocity, anchor.stamp)


LIES = [
    random_values, one_version_more, honest_values_but_a_version_more, not_a_number, the_lower_hash,
    other_bytes,
]  # fmt: skip


class Liars:
    """Peers that give false anchors, the same ones, and say that they have had those alone."""

    def __init__(self, peers: list[SimulatedPeer], how: Callable[[Anchor], Anchor]) -> None:
        self.how = how
        self.in_records = True
        """Whether they claim them to everybody, or to who fetches only."""
        self._told: dict[tuple[str, str], Anchor] = {}
        for peer in peers:
            self._spoil(peer)

    def _false(self, real: Anchor) -> Anchor:
        key = real.stamp.digest, self.how.__name__
        if key not in self._told:
            self._told[key] = self.how(real)
        return self._told[key]

    def _spoil(self, peer: SimulatedPeer) -> None:
        service, store = peer.service, peer.service.context.mailbox.store
        send, own_record = service._donations.send, service.own_record

        async def give(channel: Channel, ask: AskAnchor, anchor: Anchor) -> None:
            await send(channel, ask, self._false(anchor))

        def had(fragment: int, stamp: Stamp) -> bool:
            return any(stamp == one.stamp for one in self._told.values())

        def record() -> PeerRecord:
            stamps = tuple(self._false(store.anchor(f)).stamp for f in range(2))
            return replace(own_record(), stamps=stamps) if self.in_records else own_record()

        service._donations.send = give  # type: ignore[method-assign]
        store.had = had  # type: ignore[method-assign]
        service.own_record = record  # type: ignore[method-assign]


async def swarm(honest: tuple[str, ...], liars: tuple[str, ...]) -> Simulation:
    """Return a swarm that averages on and on, of peers that learn different things."""
    simulation = Simulation((300, 120), 5, 0.02, outer_momentum=0.5)
    for name in (*honest, *liars):
        await simulation.add(name, 0.5)
    await asyncio.sleep(8)
    for peer in simulation.peers.values():  # who is there already is not part of this
        peer.service._repairer.stale = lambda: None  # type: ignore[method-assign]
    return simulation


def mute(peer: SimulatedPeer, until_s: Callable[[], float] = lambda: math.inf) -> None:
    """Have a peer take the question what it has had, and not answer before that time."""
    answer = peer.service._answer_question

    async def hang(channel: Channel, message: Message) -> None:
        if isinstance(message, AskKnown):
            await asyncio.sleep(until_s() - asyncio.get_running_loop().time())
        await answer(channel, message)

    peer.service._answer_question = hang  # type: ignore[method-assign]


def make_up(simulation: Simulation, ghosts: int) -> None:
    """Write records of peers that are not there."""
    service, table = simulation.peers["a"].service, simulation.network.table("a")
    for number in range(ghosts):
        ghost = f"ghost{number}"
        false = replace(service.own_record(), peer_id=ghost, addresses=())
        table[ghost] = (service.context.admission.seal(false.encode()), math.inf)


def be_honest_until(peers: list[SimulatedPeer], until_s: Callable[[], float]) -> None:
    """Have peers give what everybody has had, and speak for that alone; lie from that time on."""
    true = peers[0].service.context.mailbox.store.anchor(0)
    false = forged(true)

    def spoil(peer: SimulatedPeer) -> None:
        service, store = peer.service, peer.service.context.mailbox.store
        send = service._donations.send

        async def give(channel: Channel, ask: AskAnchor, anchor: Anchor) -> None:
            lies = asyncio.get_running_loop().time() >= until_s()
            await send(channel, ask, false if lies else true)

        def had(fragment: int, stamp: Stamp) -> bool:
            return stamp in (true.stamp, false.stamp)

        service._donations.send = give  # type: ignore[method-assign]
        store.had = had  # type: ignore[method-assign]

    for peer in peers:
        spoil(peer)


def reach_slowly(peer: SimulatedPeer, names: str) -> None:
    """Have a peer wait a second before it finds that those so named are not there."""
    transport = peer.service.context.transport
    open_stream = transport.open

    async def opened(peer_id: str, *given: Any, **more: Any) -> Channel:
        await asyncio.sleep(1.0 if peer_id.startswith(names) else 0.0)
        return await open_stream(peer_id, *given, **more)

    transport.open = opened  # type: ignore[method-assign]


async def joined(simulation: Simulation, number: int, failed: tuple[str, ...] = ()) -> list[Anchor]:
    """Return what one newcomer gets, all of whose fetches ask the liars first.

    `failed`: with whom something has failed before.
    """
    late = SimulatedPeer(simulation, f"late{number}", 0.5)
    await late.service.start()
    await asyncio.sleep(0.5)  # it has met those who are there
    for name in failed:
        late.service.context.roster.suspect(name)
    fetcher = late.service.fetcher
    got = [(await fetcher.fetch(f, 20.0, LIARS)).anchor for f in range(2)]
    await late.stop_abruptly()
    simulation.network.cut(f"late{number}")
    return got


@pytest.mark.slow
def test_twenty_newcomers_end_on_what_the_honest_ones_have(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        simulation = await swarm(HONEST, LIARS)
        liars = Liars([simulation.peers[name] for name in LIARS], LIES[0])
        stores = [simulation.peers[name].service.context.mailbox.store for name in HONEST]
        for number in range(NEWCOMERS):
            # Of those who do not repair one may miss a round, and then as many lie as agree.
            while len({store.stamps() for store in stores}) > 1:
                await asyncio.sleep(0.1)
            liars.how, liars.in_records = LIES[number % len(LIES)], number % 4 < 2
            for fragment, anchor in enumerate(await joined(simulation, number)):
                had = [store.had(fragment, anchor.stamp) for store in stores]
                assert any(had), (number, liars.how, [store.stamps() for store in stores])
                assert digest_of(anchor.values, anchor.velocity) == anchor.stamp.digest

    with caplog.at_level(logging.INFO):
        run_virtual(scenario)
    assert "could not tell" not in caplog.text


def test_where_as_many_lie_as_do_not_a_newcomer_says_that_it_could_not_tell(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        simulation = await swarm(HONEST[:1], LIARS[:1])
        Liars([simulation.peers[LIARS[0]]], random_values)
        await asyncio.sleep(2)
        await joined(simulation, 0)

    with caplog.at_level(logging.WARNING):
        run_virtual(scenario)
    assert "could not tell whose is right" in caplog.text


@pytest.mark.slow
def test_where_nobody_answers_a_newcomer_says_that_it_could_not_tell(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Silence is no consent."""

    async def scenario() -> None:
        simulation = await swarm(HONEST, LIARS[:1])
        Liars([simulation.peers[LIARS[0]]], random_values)
        for name in HONEST:
            mute(simulation.peers[name])
        await joined(simulation, 0)

    with caplog.at_level(logging.WARNING):
        run_virtual(scenario)
    assert "3 have not answered; this peer could not tell whose is right" in caplog.text


@pytest.mark.slow
def test_peers_that_are_not_there_keep_no_newcomer_from_what_the_others_have(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """200 records that anybody can write: it cannot tell, and takes what those say who answer."""

    async def scenario() -> None:
        simulation = await swarm(HONEST, LIARS[:1])
        Liars([simulation.peers[LIARS[0]]], the_lower_hash)
        await asyncio.sleep(2)
        make_up(simulation, 200)
        stores = [simulation.peers[name].service.context.mailbox.store for name in HONEST]
        for number in range(4):
            for fragment, anchor in enumerate(await joined(simulation, number)):
                assert any(store.had(fragment, anchor.stamp) for store in stores), number

    with caplog.at_level(logging.WARNING):
        run_virtual(scenario)
    assert "could not tell whose is right" in caplog.text


@pytest.mark.slow
def test_liars_that_tell_the_truth_at_first_are_not_believed_for_it() -> None:
    """As many as are asked again at a time, of whom more speak well than of the others."""
    liars = ("liar1", "liar2", "liar3", "liar4")

    async def scenario() -> None:
        simulation = await swarm((*HONEST, "d", "e", "f"), liars)
        loop = asyncio.get_running_loop()
        honest_until_s = math.inf
        be_honest_until([simulation.peers[name] for name in liars], lambda: honest_until_s)
        make_up(simulation, 200)
        late = SimulatedPeer(simulation, "late", 0.5)
        reach_slowly(late, "ghost")
        await late.service.start()
        await asyncio.sleep(0.5)
        honest_until_s = loop.time() + 10.0  # as long as it asks who has had it, too
        got = (await late.service.fetcher.fetch(0, 20.0, liars)).anchor
        stores = [simulation.peers[name].service.context.mailbox.store for name in HONEST]
        assert any(store.had(0, got.stamp) for store in stores)

    run_virtual(scenario)


def test_of_those_who_are_asked_most_were_not_met_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liars can come in numbers, too."""
    monkeypatch.setattr("random.sample", lambda those, count: list(those)[:count])
    strangers, met = ([f"{kind}{n}" for n in range(20)] for kind in ("stranger", "met"))
    context: Any = SimpleNamespace(roster=SimpleNamespace(met=met.__contains__))

    def asked(*names: str) -> list[str]:
        records: Any = [SimpleNamespace(peer_id=name) for name in names]
        return [record.peer_id for record in vouching._chosen(context, records)]

    assert asked(*strangers, *met) == [*met[:7], *strangers[:9]]
    assert asked(*met) == met[:16]
    assert asked(*met[:2], strangers[0]) == [*met[:2], strangers[0]]


@pytest.mark.slow
def test_who_answers_nothing_does_not_hold_a_newcomer_at_each_fragment() -> None:
    """It asks less long for the next ones; once one could be told, as long as ever."""

    async def scenario() -> None:
        simulation = await swarm(HONEST, ())
        late = SimulatedPeer(simulation, "late", 0.5)
        await late.service.start()
        loop, silent_until_s = asyncio.get_running_loop(), math.inf
        for name in HONEST:
            mute(simulation.peers[name], lambda: silent_until_s)

        async def held_s() -> float:
            begun_s = loop.time()
            await late.service.fetcher.fetch(0, 40.0)
            return loop.time() - begun_s

        held = [await held_s() for _ in range(8)]
        assert held[0] >= 20.0
        assert sum(held) < 20.0 + 10.0 + 5.0 + 5 * 2.5 + 8 * 3.5
        silent_until_s = 0.0
        assert await held_s() < 2.5
        silent_until_s = math.inf
        assert await held_s() >= 20.0

    run_virtual(scenario)


@pytest.mark.slow
def test_donors_that_give_nothing_hold_a_newcomer_once_each() -> None:
    """They accept streams, renew their records and say nothing; their ids sort first."""
    silent = ("A1", "A2", "A3", "A4")

    async def scenario() -> None:
        simulation = await swarm((*HONEST, *silent), ())

        async def hang(channel: Channel, ask: AskAnchor, anchor: Anchor) -> None:
            await asyncio.sleep(math.inf)

        for name in silent:
            simulation.peers[name].service._donations.send = hang  # type: ignore[method-assign]
        late = SimulatedPeer(simulation, "late", 0.5)
        await late.service.start()
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        for _ in range(10):
            await late.service.fetcher.fetch(0, 40.0)
            await asyncio.sleep(2.0)  # all of them renew their records
            late.service.context.roster.update(await late.service.context.directory.records())
        assert loop.time() - begun_s < 10 * 3.0 + len(silent) * 5.0

    run_virtual(scenario)


@pytest.mark.parametrize("late", ["answers", "links"])
def test_a_newcomer_asks_again_who_has_not_answered(
    caplog: pytest.LogCaptureFixture, late: str
) -> None:
    async def scenario() -> None:
        simulation = await swarm(HONEST, LIARS[:1])
        Liars([simulation.peers[LIARS[0]]], the_lower_hash)
        await asyncio.sleep(2)
        until_s = asyncio.get_running_loop().time() + 6.0
        for name in HONEST if late == "answers" else ():
            mute(simulation.peers[name], lambda: until_s)
        stores = [simulation.peers[name].service.context.mailbox.store for name in HONEST]
        failed = HONEST if late == "links" else ()
        for fragment, anchor in enumerate(await joined(simulation, 0, failed)):
            assert any(store.had(fragment, anchor.stamp) for store in stores)

    with caplog.at_level(logging.WARNING):
        run_virtual(scenario)
    assert "could not tell" not in caplog.text


def test_who_has_just_been_killed_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """Its record still lives: nobody listens where it did."""

    async def scenario() -> None:
        simulation = await swarm(HONEST[:2], ())
        await simulation.kill(HONEST[1])
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        await joined(simulation, 0)
        assert HONEST[1] in await simulation.peers[HONEST[0]].service.context.directory.records()
        assert loop.time() < begun_s + 3.0

    with caplog.at_level(logging.WARNING):
        run_virtual(scenario)
    assert "could not tell" not in caplog.text


@pytest.mark.parametrize("open_to_all", [True, False])
def test_who_sees_one_peer_only_says_once_that_it_cannot_tell(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, open_to_all: bool
) -> None:
    """A liar that it joins through may keep all others' records from it; with a key no stranger."""
    monkeypatch.setattr(Admission, "is_open", open_to_all)

    async def scenario() -> None:
        simulation = await swarm(HONEST[:1], LIARS[:1])
        Liars([simulation.peers[LIARS[0]]], random_values)
        simulation.network.split({HONEST[0]}, {LIARS[0], "late0"})
        simulation.network.table(LIARS[0]).pop(HONEST[0])
        late = SimulatedPeer(simulation, "late0", 0.5)
        await late.service.start()
        await asyncio.sleep(0.5)
        for fragment in range(2):
            await late.service.fetcher.fetch(fragment, 20.0)
        await late.stop_abruptly()

    with caplog.at_level(logging.WARNING):
        run_virtual(scenario)
    said = [line for line in caplog.messages if "peer liar is the only one that this" in line]
    assert ["cannot tell" in line for line in said] == [True] * open_to_all
