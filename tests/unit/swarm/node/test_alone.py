"""A peer alone makes no anchor that others, who come or leave just then, make otherwise."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import pytest

from atombench.virtual.clock import run_virtual
from atomtrain.swarm.catchup.joining import ask_manifest
from atomtrain.swarm.membership.records import JOINING, TRAINING
from atomtrain.swarm.node.newcomers import Newcomers
from atomtrain.swarm.transport.messages import Propose
from tests.support.swarm_virtual import SimulatedPeer, Simulation


def _forks(simulation: Simulation) -> list[tuple[int, int]]:
    """Return fragments and versions of which peers hold different anchors."""
    held: dict[tuple[int, int], set[str]] = defaultdict(set)
    for peer in simulation.peers.values():
        for fragment, stamp in enumerate(peer.service.context.mailbox.store.stamps()):
            if stamp is not None:
                held[fragment, stamp.version].add(stamp.digest)
    return [which for which, digests in held.items() if len(digests) > 1]


async def _join(simulation: Simulation, name: str) -> None:
    """Join as `atom train` does: it makes its model between the manifest and the anchors."""
    peer = SimulatedPeer(simulation, name, 0.3)
    context = peer.service.context
    channel = await context.transport.open("a")
    await ask_manifest(channel, context.admission, 5.0)
    channel.close()
    await asyncio.sleep(1)
    await simulation.enter(peer)


@pytest.mark.parametrize("seed", range(6))
def test_newcomers_make_no_other_anchor_than_who_was_alone(seed: int) -> None:
    """Two who agree on what they fetched are more than one who has replaced it meanwhile."""

    async def scenario() -> None:
        simulation = Simulation((5, 9, 12), seed, local_steps_per_round=3)
        first = await simulation.add("a", step_s=0.3)
        await asyncio.sleep(3 + 0.1 * seed)
        assert {report.reason for report in first.reports} == {"alone"}
        await asyncio.gather(_join(simulation, "b"), _join(simulation, "c"))
        for _ in range(100):
            await asyncio.sleep(0.1)
            assert _forks(simulation) == []
        assert any(len(report.contributors) == 3 for report in first.reports)

    run_virtual(scenario)


def test_who_leaves_makes_nothing_alone() -> None:
    """Those who left a moment before may have made that version together."""

    async def scenario() -> None:
        simulation = Simulation((20,), seed=1)
        peer = await simulation.add("a", step_s=0.5)
        context = peer.service.context
        while context.agenda.running is None:
            await asyncio.sleep(0.01)
        assert context.mailbox.snapshot_wanted, "its trainer is within a step"
        before = context.mailbox.stamp(0)
        peer.service.withdraw()
        await asyncio.sleep(5)
        assert not peer.service.in_rounds
        assert context.mailbox.stamp(0) == before

    run_virtual(scenario)


def test_members_that_fetch_something_are_no_newcomers() -> None:
    async def scenario() -> None:
        simulation = Simulation((20,), seed=1)
        for name in ("a", "b"):
            await simulation.add(name, step_s=0.5)
        await asyncio.sleep(60)
        newcomers = simulation.peers["a"].service._rounds.newcomers
        assert not newcomers.coming, "b has come long ago"
        for context, comes in (
            (simulation.peers["b"].service.context, False),
            (SimulatedPeer(simulation, "c", 0.5).service.context, True),
        ):
            channel = await context.transport.open("a")
            await ask_manifest(channel, context.admission, 5.0)
            channel.close()
            assert newcomers.coming == comes

    run_virtual(scenario)


def test_who_is_not_seen_to_train_yet_leads_nobody_into_a_round_without_it() -> None:
    """The round would be over for the one that was asked, and the other would wait for it."""

    async def scenario() -> None:
        simulation = Simulation((20,), seed=1, local_steps_per_round=100_000)
        for name in ("a", "b"):
            await simulation.add(name, step_s=0.5)
        await asyncio.sleep(10)
        a, b = (simulation.peers[name].service for name in "ab")
        rounds, proposal = a._rounds, Propose(round_index=a.context.agenda.next_round)
        b.state = JOINING
        await b._publish()
        a.context.roster.update(await a.context.directory.records())
        answer = await rounds.consider("b", proposal)
        assert (answer.accepted, answer.round_index) == (False, proposal.round_index)
        assert not rounds.under_way
        b.state = TRAINING
        await b._publish()
        assert (await rounds.consider("b", proposal)).accepted, "its record is there, unseen"
        await asyncio.sleep(3)
        [report] = simulation.peers["b"].reports
        assert report.contributors == ("a", "b")

    run_virtual(scenario)


def test_whoever_asks_for_ever_holds_nothing_up() -> None:
    now_s = 0.0
    newcomers = Newcomers(6.0, lambda: now_s)
    assert not newcomers.coming
    newcomers.hear()
    now_s = 5.9
    assert newcomers.coming
    now_s = 6.0
    assert not newcomers.coming
    for later_s in (7.0, 12.0, 17.0, 22.0, 23.0):
        now_s = later_s
        newcomers.hear()
        assert newcomers.coming
    now_s = 24.0
    newcomers.hear()
    assert not newcomers.coming
    newcomers.forget()
    newcomers.hear()
    assert newcomers.coming
