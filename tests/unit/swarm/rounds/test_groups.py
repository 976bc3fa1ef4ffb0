"""Rounds of several groups: who is in which, that means are right, and that replicas stay near."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from atombench.virtual.clock import run_virtual
from atomtrain.errors import ConfigError
from atomtrain.swarm.anchors.stamps import Stamp, siblings, supersedes
from atomtrain.swarm.codecs import slices
from atomtrain.swarm.membership.agenda import group_count, group_of, groups_of, told_next
from atomtrain.swarm.membership.roster import Roster
from atomtrain.swarm.membership.rules import MEANS
from atomtrain.swarm.rounds.bases import Bases
from atomtrain.swarm.rounds.exchange import Exchange
from atomtrain.swarm.rounds.exchange_setup import ExchangeSetup
from atomtrain.swarm.transport.messages import Begin
from tests.support.going_on import all_go_on
from tests.support.swarm_configs import swarm_config
from tests.support.swarm_virtual import SimulatedPeer, Simulation
from tests.unit.swarm.rounds.test_vandals import Vandal

pytestmark = pytest.mark.slow

NESTEROV = {"outer_momentum": 0.5, "outer_learning_rate": 0.5}


def no_step(peer: SimulatedPeer) -> None:
    """Train without learning."""


async def start(simulation: Simulation, peers: int, **how: Any) -> None:
    for index in range(peers):
        await simulation.add(f"peer{index}", simulation.random.uniform(0.4, 0.6), **how)


def variance(simulation: Simulation, fragment: int = 0) -> float:
    """Return how far the peers' parameters are apart."""
    rows = torch.stack([peer.fragments[fragment] for peer in simulation.peers.values()])
    return float(rows.var(dim=0).mean())


# Who is with whom


@given(st.integers(1, 200), st.integers(3, 20), st.integers(0, 10**6))
def test_groups_are_bounded_and_even(peers: int, size: int, round_index: int) -> None:
    names = [f"p{i}" for i in range(peers)]
    groups = groups_of("run", round_index, names, size)
    assert sorted(name for group in groups for name in group) == sorted(names)
    sizes = [len(group) for group in groups]
    assert max(sizes) <= size
    assert max(sizes) - min(sizes) <= 1
    assert len(groups) == group_count(peers, size)
    if peers > 1:
        assert min(sizes) > 1
    shuffled = random.Random(round_index).sample(names, len(names))
    assert groups_of("run", round_index, shuffled, size) == groups
    assert all(name in group_of("run", round_index, names, size, name) for name in names)
    assert groups_of("run", round_index, names, 0) == [[n for g in groups for n in g]]


def test_everybody_meets_everybody() -> None:
    names = [f"p{i}" for i in range(64)]
    pairs = {frozenset(pair) for pair in combinations(names, 2)}
    for round_index in range(60):
        for group in groups_of("run", round_index, names, 8):
            pairs -= {frozenset(pair) for pair in combinations(group, 2)}
    # Each of 2016 pairs stays apart in all of 60 rounds with probability (1 - 7/63)^60 = 0.0009.
    assert len(pairs) < 12


@given(st.integers(2, 5000), st.integers(0, 10**6))
def test_all_groups_are_told_in_a_few_steps(count: int, first: int) -> None:
    known = at = {first % count}
    for _ in range((count - 1).bit_length()):
        at = {other for group in at for other in told_next(group, count)}
        known = known | at
    assert len(known) == count
    assert all(len(told_next(group, count)) <= 2 for group in range(count))


@pytest.mark.parametrize(("peers", "size"), [(64, 8), (24, 6), (24, 12)])
def test_each_round_shrinks_the_variance_as_stated(peers: int, size: int) -> None:
    """q = (K - G) / (G (K - 1)): means of samples without replacement."""
    names = [f"p{i}" for i in range(peers)]
    values = torch.randn(peers, 100, generator=torch.Generator().manual_seed(1))
    place = {name: i for i, name in enumerate(names)}
    shares = []
    for round_index in range(200):
        after = torch.empty_like(values)
        for group in groups_of("run", round_index, names, size):
            members = [place[name] for name in group]
            after[members] = values[members].mean(dim=0)
        shares.append(float((after.var(dim=0) / values.var(dim=0)).mean()))
    stated = (peers - size) / (size * (peers - 1))
    assert sum(shares) / len(shares) == pytest.approx(stated, rel=0.03)


def test_siblings_do_not_replace_each_other() -> None:
    own = Stamp(10, 1000, "b" * 32)
    more, far = Stamp(11, 1100, "a" * 32), Stamp(13, 1300, "a" * 32)
    assert supersedes(more, own, 0)
    assert not supersedes(more, own, 2)
    assert siblings(more, own, 2)
    assert supersedes(far, own, 2)
    assert not supersedes(own, far, 2)
    assert not siblings(Stamp(10, 1000, "a" * 32), own, 0)
    fewer_rounds = Stamp(5, 5000, "a" * 32)  # the half of a cut network that learnt from more
    assert supersedes(fewer_rounds, own, 2)


def test_group_size_is_a_rule_of_the_run() -> None:
    assert swarm_config(run="r").rules.group_size == 16
    assert swarm_config(run="r", group_size=8).rules.group_size == 8
    assert swarm_config(run="r", average="gradient", target_batch_tokens=9).rules.group_size == 0
    for wrong in ({"group_size": 2}, {"group_size": -1},
                  {"group_size": 8, "average": "gradient", "target_batch_tokens": 9}):  # fmt: skip
        with pytest.raises(ConfigError, match="group-size"):
            swarm_config(run="r", **wrong)  # type: ignore[arg-type]


# The whole protocol


@pytest.mark.parametrize("wire", ["float32", "int4"])
def test_nine_peers_in_groups_of_three(wire: str) -> None:
    async def scenario() -> None:
        simulation = Simulation(
            (40, 31), 1, group_size=3, wire=wire, overlap_weight=0.5, **NESTEROV
        )
        await start(simulation, 9)
        await asyncio.sleep(30)
        for peer in simulation.peers.values():
            averaged = [report for report in peer.reports[10:] if report.outcome == "averaged"]
            assert len(averaged) > 8
            assert all(2 <= len(report.contributors) <= 3 for report in averaged[1:])
            others = {c for report in averaged for c in report.contributors}
            assert len(others) > 7, "everybody averages with everybody by and by"
        assert simulation.check_means() > 100
        versions = [version for peer in simulation.peers.values() for version in peer.versions()]
        assert max(versions) - min(versions) <= 3
        # An estimate of what all have trained, not of one group's part.
        tokens = max(p.service.context.mailbox.store.stamps()[0].tokens
                     for p in simulation.peers.values())  # type: ignore[union-attr]  # fmt: skip
        trained = sum(
            p.service.context.mailbox.store.tokens_seen for p in simulation.peers.values()
        )
        assert 0.5 < tokens / trained < 2.0

    run_virtual(scenario)


@pytest.mark.parametrize("mean", MEANS)
def test_peers_that_learn_nothing_come_together(mean: str) -> None:
    """Variance shrinks by about the size of the group in each round, and the plain mean stays."""

    async def scenario() -> None:
        simulation = Simulation((200,), 2, group_size=4, mean=mean, **NESTEROV)
        await start(simulation, 12, step=no_step)
        await asyncio.sleep(10)
        for peer in simulation.peers.values():
            peer.fragments[0].add_(torch.randn(200))
        before = variance(simulation)
        (version,) = simulation.peers["peer0"].versions()
        while simulation.peers["peer0"].versions()[0] < version + 7:
            await asyncio.sleep(0.5)
        # The first round takes half of a change, and momentum brings the rest in the next ones;
        # peers that lack the certificate of another group's anchor come a round later.
        assert variance(simulation) < before / 100
        if mean == "plain":
            simulation.check_means()

    run_virtual(scenario)


@pytest.mark.parametrize("mean", MEANS)
def test_drift_stays_bounded_and_ends_when_one_group_has_all(mean: str) -> None:
    async def scenario() -> None:
        simulation = Simulation((200,), 3, group_size=4, mean=mean, **NESTEROV)
        await start(simulation, 8)
        found = []
        for _ in range(8):
            await asyncio.sleep(5)
            found.append(variance(simulation))
        assert max(found[4:]) < 3 * max(found[1:4]), "it does not grow"
        for name in ("peer1", "peer3", "peer5", "peer7"):
            await simulation.kill(name)
        await asyncio.sleep(20)
        assert simulation.peers["peer0"].reports[-1].outcome == "averaged"
        assert len(simulation.peers["peer0"].reports[-1].contributors) == 4
        assert await simulation.settle(20), "one group has one anchor"
        stores = [peer.service.context.mailbox.store for peer in simulation.peers.values()]
        assert not any(store.grouped(0) for store in stores)
        velocities = [store.velocity(0) for store in stores]
        assert all(torch.equal(v, velocities[0]) for v in velocities if v is not None)
        if mean == "plain":
            simulation.check_means()

    run_virtual(scenario)


def test_a_newcomer_takes_a_siblings_anchor_and_takes_part() -> None:
    async def scenario() -> None:
        simulation = Simulation((20, 20), 4, group_size=3, **NESTEROV)
        await start(simulation, 7)
        await asyncio.sleep(20)
        late = await simulation.add("late", 0.5)
        assert min(late.versions()) > 0
        await asyncio.sleep(30)
        assert any("late" in report.contributors for report in late.reports)
        fetched = [
            r for p in simulation.peers.values() for r in p.reports if r.outcome == "fetched"
        ]
        assert len(fetched) < 4, "siblings are not fetched over and over"
        simulation.check_means()

    run_virtual(scenario)


def test_a_resumed_peer_keeps_its_velocity() -> None:
    async def scenario() -> None:
        simulation = Simulation((20,), 5, group_size=3, **NESTEROV)
        await start(simulation, 6)
        await asyncio.sleep(20)
        for peer in simulation.peers.values():
            store = peer.service.context.mailbox.store
            tensors = {name: t.clone() for name, t in store.tensors().items()}
            again = type(store)((20,), 1)
            again.load(tensors, store.meta())
            assert again.stamps() == store.stamps()
            assert again.grouped(0)
            velocity, kept = store.velocity(0), again.velocity(0)
            assert velocity is not None
            assert kept is not None
            assert velocity.any()
            assert torch.equal(velocity, kept)

    run_virtual(scenario)


def test_a_false_base_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner that sends another anchor than its own keeps its slices from being committed."""
    encode, enter = Bases._encode, Exchange.__init__
    liars: list[Bases | None] = []
    told: list[bool] = []

    def lie(self: Bases, index: int) -> Any:
        if any(liar is self for liar in liars):
            anchor = replace(self._snapshot.anchor, values=self._snapshot.anchor.values + 1e8)
            self._snapshot = replace(self._snapshot, anchor=anchor)
        return encode(self, index)

    def entered(self: Exchange, setup: ExchangeSetup, begin: Begin) -> None:
        enter(self, setup, begin)
        if told and setup.peer_id == "peer1":
            liars.append(self._bases)

    monkeypatch.setattr(Bases, "_encode", lie)
    monkeypatch.setattr(Exchange, "__init__", entered)

    async def scenario() -> None:
        simulation = Simulation((300,), 7, group_size=3)
        await start(simulation, 6)
        await asyncio.sleep(15)
        told.append(True)
        await asyncio.sleep(15)
        reports = [r for p in simulation.peers.values() for r in p.reports]
        assert any("its anchor is far" in text for r in reports for text in r.rejected)
        for name, peer in simulation.peers.items():
            assert name == "peer1" or float(peer.fragments[0].abs().max()) < 1e4

    run_virtual(scenario)


@settings(max_examples=5, deadline=None, phases=(Phase.reuse, Phase.generate))  # no long search
@given(
    seed=st.integers(0, 10**6),
    peers=st.integers(4, 8),
    size=st.integers(3, 4),
    delay_s=st.floats(0.0, 0.3),
    deaths=st.lists(st.tuples(st.integers(0, 7), st.floats(0.1, 10.0)), max_size=3),
    wire=st.sampled_from(["float32", "float16", "int4"]),
    several=st.booleans(),
    blind=st.booleans(),
)
def test_groups_under_random_schedules(
    seed: int,
    peers: int,
    size: int,
    delay_s: float,
    deaths: list[tuple[int, float]],
    wire: str,
    several: bool,
    blind: bool,
) -> None:
    """Deaths at any moment, and peers that do not see all others: no mean is ever wrong."""

    async def scenario() -> None:
        simulation = Simulation((30, 17), seed, delay_s, group_size=size, wire=wire, **NESTEROV)
        await start(simulation, peers)
        for victim, after_s in deaths:
            await asyncio.sleep(after_s)
            name = f"peer{victim}"
            if name in simulation.peers and len(simulation.peers) > 2:
                await simulation.kill(name)
        await all_go_on(simulation)
        simulation.check_means()

    with pytest.MonkeyPatch.context() as patch:
        if several:
            patch.setattr(slices, "SLICE_ELEMENTS", 8)
        if blind:
            patch.setattr(Roster, "update", half_blind(random.Random(seed)))
        run_virtual(scenario)


def half_blind(rng: random.Random) -> Any:
    """Return what makes each reading of the records miss some of them."""
    update = Roster.update

    def missing_some(self: Roster, found: dict[str, bytes]) -> None:
        update(self, {name: data for name, data in found.items() if rng.random() > 0.15})

    return missing_some


@settings(max_examples=2, deadline=None, phases=(Phase.reuse, Phase.generate))
@given(seed=st.integers(0, 10**6), record=st.booleans())
def test_vandals_among_groups(seed: int, record: bool) -> None:
    async def scenario() -> None:
        simulation = Simulation((30, 17), seed, 0.1, group_size=3)
        await start(simulation, 6)
        await Vandal(simulation, record).rage(25.0)
        await all_go_on(simulation)
        simulation.check_means()

    run_virtual(scenario)


def test_halves_of_a_cut_network_with_groups_grow_together() -> None:
    async def scenario() -> None:
        simulation = Simulation((30,), 6, group_size=3, **NESTEROV)
        await start(simulation, 8)
        await asyncio.sleep(20)
        names = sorted(simulation.peers)
        simulation.network.split(set(names[:5]), set(names[5:]))
        before = {name: sum(peer.versions()) for name, peer in simulation.peers.items()}
        await asyncio.sleep(60)
        for name, peer in simulation.peers.items():
            assert sum(peer.versions()) > before[name] + 3, "both halves go on"
        simulation.network.heal()
        await asyncio.sleep(90)
        for peer in simulation.peers.values():
            seen = {c for report in peer.reports[-20:] for c in report.contributors}
            assert len(seen) > 5, "both halves average with each other"
        # A step adds a half on average: replicas are a few steps apart, and not a minute's.
        assert variance(simulation) < 25
        simulation.check_means()

    run_virtual(scenario)
