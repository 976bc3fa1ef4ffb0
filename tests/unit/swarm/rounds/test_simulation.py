"""The whole protocol on a virtual clock: speeds, newcomers, momentum, pace, lies, a leader's death.

Random schedules are in `test_interleavings.py`.
"""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
import torch

from atombench.virtual.clock import run_virtual
from atomtrain.swarm.rounds.leader_io import LeaderIO
from atomtrain.swarm.rounds.leader_state import Outgoing
from atomtrain.swarm.rounds.owning import OwnedSlice
from atomtrain.swarm.transport.messages import Commit
from tests.support.swarm_virtual import Simulation

pytestmark = pytest.mark.slow


def test_three_peers_average_and_agree() -> None:
    async def scenario() -> None:
        simulation = Simulation((50, 31), seed=1)
        for name in ("a", "b", "c"):
            await simulation.add(name, step_s=0.5)
        await asyncio.sleep(60)
        averaged = [r for r in simulation.peers["a"].reports if len(r.contributors) == 3]
        assert len(averaged) > 10
        assert {report.outcome for report in averaged} == {"averaged"}
        assert await simulation.settle(20)
        assert simulation.check_means() > 30

    run_virtual(scenario)


def test_peers_of_very_different_speed_average_all_that_they_learn() -> None:
    async def scenario() -> None:
        simulation = Simulation((50, 31), seed=1)
        for name, step_s in (("fast", 0.1), ("fast too", 0.1), ("slow", 1.0)):
            await simulation.add(name, step_s)
        await asyncio.sleep(60)
        slow = simulation.peers["slow"].reports
        together = [r for r in slow if r.outcome == "averaged" and len(r.contributors) == 3]
        assert len(together) > 20
        weights = [dict(zip(r.contributors, r.weights, strict=True)) for r in together]
        share = sum(one["slow"] for one in weights) / sum(sum(one.values()) for one in weights)
        assert 0.03 < share < 0.07, "of 21 steps one is the slow peer's"
        assert await simulation.settle(20)
        assert simulation.check_means() > 60

    run_virtual(scenario)


def test_rounds_are_spread_evenly_over_the_steps() -> None:
    """Four fragments, sixteen steps: one of them every four steps, so that traffic is even."""

    async def scenario() -> None:
        simulation = Simulation((20, 30, 40, 50), seed=1, local_steps_per_round=16)
        for name in ("a", "b", "c"):
            await simulation.add(name, step_s=0.5)
        await asyncio.sleep(20)
        seen = simulation.peers["a"].reports
        ended_s: list[float] = []
        seen.clear()
        for _ in range(1200):
            await asyncio.sleep(0.1)
            ended_s += [asyncio.get_running_loop().time()] * (len(seen) - len(ended_s))
        fragments = [report.fragment for report in seen]
        assert fragments == [(fragments[0] + i) % 4 for i in range(len(fragments))]
        gaps_s = [after - before for before, after in pairwise(ended_s)]
        assert len(gaps_s) > 50
        assert 1.4 < min(gaps_s) <= max(gaps_s) < 2.6, gaps_s

    run_virtual(scenario)


def test_rounds_that_hold_progress_back_lose_nothing() -> None:
    async def scenario() -> None:
        simulation = Simulation((50, 31), seed=1, overlap_weight=0.5, outer_momentum=0.5)
        for name in ("a", "b", "c"):
            await simulation.add(name, step_s=0.5)
        await asyncio.sleep(30)
        assert any(len(r.contributors) == 3 for r in simulation.peers["a"].reports)
        assert await simulation.settle(20)

    run_virtual(scenario)


def test_what_is_beyond_the_anchor_is_what_was_not_merged_yet() -> None:
    """Nothing is lost, nothing counts twice."""

    async def scenario() -> None:
        simulation = Simulation((8,), seed=2)
        peers = [await simulation.add(name, step_s=0.5) for name in ("a", "b")]
        await asyncio.sleep(40)
        assert await simulation.settle(20)
        store = [peer.service.context.mailbox.store for peer in peers]
        for s, peer in zip(store, peers, strict=True):
            progress = peer.fragments[0] - s.anchor(0).values
            merged = s._tokens_merged[0]
            unmerged_steps = (s.tokens_seen - merged) / 10
            # Each step adds between 0 and 1: what is not merged yet is what these steps added.
            assert bool((progress >= -1e-3).all())
            assert bool((progress <= unmerged_steps + 1e-3).all())

    run_virtual(scenario)


def test_newcomer_starts_from_the_anchor_and_takes_part() -> None:
    async def scenario() -> None:
        simulation = Simulation((20, 20), seed=3)
        await simulation.add("a", step_s=0.3)
        await asyncio.sleep(15)
        late = await simulation.add("z", step_s=0.3)
        assert min(late.versions()) > 0
        await asyncio.sleep(20)
        assert any("z" in report.contributors for report in late.reports)
        assert await simulation.settle(20)

    run_virtual(scenario)


def test_anchor_of_a_lonely_peer_follows_its_parameters() -> None:
    async def scenario() -> None:
        simulation = Simulation((10,), seed=4)
        peer = await simulation.add("a", step_s=0.3)
        await asyncio.sleep(20)
        assert {report.reason for report in peer.reports} == {"alone"}
        peer.training = False
        anchor = peer.service.context.mailbox.store.anchor(0)
        assert anchor.stamp.version > 5
        assert float(anchor.values.mean()) > 20

    run_virtual(scenario)


def test_nobody_goes_alone_because_a_stream_broke() -> None:
    """What one peer makes alone the others have to refuse, or to fetch and try."""

    async def scenario() -> None:
        simulation = Simulation((50, 31), seed=1)
        for name in ("a", "b", "c"):
            await simulation.add(name, step_s=0.5)
        await asyncio.sleep(20)
        peers = simulation.peers
        begun = {name: len(peer.reports) for name, peer in peers.items()}
        for turn in range(400):
            if turn % 50 == 49:  # not for as long as a record lives: then it would
                await asyncio.sleep(3)
            for other in "bc" if turn % 2 else "ac":
                peers["b" if other == "a" else "a"].service.context.roster.suspect(other)
            await asyncio.sleep(0.1)
        await asyncio.sleep(20)
        said = [r for name, peer in peers.items() for r in peer.reports[begun[name] :]]
        assert [r for r in said if r.reason == "alone"] == []
        assert len([r for r in said[-10:] if r.outcome == "averaged"]) > 5
        assert await simulation.settle(20)

    run_virtual(scenario)


def test_a_survivor_goes_alone_when_the_record_of_the_dead_has_expired() -> None:
    async def scenario() -> None:
        simulation = Simulation((10,), seed=4)
        peer, other = [await simulation.add(name, step_s=0.3) for name in ("a", "b")]
        await asyncio.sleep(20)
        assert any(r.contributors == ("a", "b") for r in peer.reports)
        await simulation.kill(other.name)
        begun = len(peer.reports)
        await asyncio.sleep(3)
        assert all(r.reason != "alone" for r in peer.reports[begun:])
        await asyncio.sleep(20)
        assert peer.reports[-1].reason == "alone"

    run_virtual(scenario)


def test_a_record_that_lasts_for_an_hour_keeps_nobody_from_going_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who takes part once, and is silent then, would keep newcomers from the survivor's anchors."""

    async def scenario() -> None:
        simulation = Simulation((10,), seed=4)
        peer, other = [await simulation.add(name, step_s=0.3) for name in ("a", "b")]
        directory = other.service.context.directory
        publish = directory.publish

        async def for_an_hour(record: bytes, _: float) -> None:
            await publish(record, 3600.0)

        monkeypatch.setattr(directory, "publish", for_an_hour)
        await asyncio.sleep(20)
        assert any(r.contributors == ("a", "b") for r in peer.reports)
        await simulation.kill(other.name)
        begun = len(peer.reports)
        await asyncio.sleep(3)
        assert all(r.reason != "alone" for r in peer.reports[begun:])
        await asyncio.sleep(30)
        assert peer.service.context.roster.may_answer_again
        assert [r.reason for r in peer.reports[-3:]] == ["alone"] * 3

    run_virtual(scenario)


def test_momentum_reaches_newcomers() -> None:
    async def scenario() -> None:
        simulation = Simulation((12,), seed=5, outer_momentum=0.5, outer_learning_rate=0.7)
        for name in ("a", "b"):
            await simulation.add(name, step_s=0.4)
        await asyncio.sleep(30)
        await simulation.add("c", step_s=0.4)
        await asyncio.sleep(30)
        assert await simulation.settle(20)
        velocities = [
            p.service.context.mailbox.store.anchor(0).velocity for p in simulation.peers.values()
        ]
        assert velocities[0] is not None
        assert bool(velocities[0].any())
        assert all(torch.equal(velocities[0], v) for v in velocities if v is not None)

    run_virtual(scenario)


def test_pace_follows_the_link() -> None:
    """With steps per round left to measurement, rounds fill most of the time, and not all."""

    async def pace(delay_s: float, for_s: float) -> tuple[int, float]:
        simulation = Simulation((40, 40), 8, delay_s, local_steps_per_round=0)
        for name in ("a", "b", "c"):
            await simulation.add(name, step_s=0.25)
        await asyncio.sleep(for_s)
        assert {r.outcome for r in simulation.peers["a"].reports[-4:]} == {"averaged"}
        contexts = [peer.service.context for peer in simulation.peers.values()]
        steps = [context.agenda.steps_per_fragment for context in contexts]
        assert max(steps) - min(steps) <= 4, "the same records, but for the newest"
        return min(steps), max(context.timing.round_s for context in contexts)

    async def scenario() -> None:
        near, _ = await pace(0.02, 20)
        assert near <= 2
        far, round_s = await pace(1.0, 200)
        assert 0.5 < round_s / (0.25 * far) < 0.95

    run_virtual(scenario)


def test_false_means_of_an_owner_are_not_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = OwnedSlice._encode

    def lie(self: OwnedSlice, contributors: tuple[int, ...], mean: torch.Tensor) -> Any:
        owner = self._begin.members[self._index]
        return encode(self, contributors, mean * (1e6 if owner == "c" and lying else 1))

    lying: list[bool] = []
    monkeypatch.setattr(OwnedSlice, "_encode", lie)

    async def scenario() -> None:
        simulation = Simulation((300,), seed=12)
        for name in ("a", "b", "c"):
            await simulation.add(name, step_s=0.5)
        await asyncio.sleep(20)
        lying.append(True)
        await asyncio.sleep(2)  # a round that began before
        before = len(simulation.peers["a"].reports)
        await asyncio.sleep(20)
        reports = simulation.peers["a"].reports[before:]
        assert len(reports) > 3
        # Who counts as rejected is lowered, and may not follow whoever does that.
        assert all("1 slices missing" in r.reason or r.contributors == ("a", "b") for r in reports)
        assert any("1 slices missing" in report.reason for report in reports)
        assert any("mean is not" in text for report in reports for text in report.rejected)
        assert float(simulation.peers["a"].fragments[0].abs().max()) < 1e4
        simulation.check_means()

    run_virtual(scenario)


def test_leader_dies_while_it_tells_its_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who did not hear it finds the new anchor, and knows that its contribution is in it."""
    told: list[str] = []

    async def scenario() -> None:
        simulation = Simulation((30,), seed=6)
        for name in ("a", "b", "c"):
            await simulation.add(name, step_s=0.5)
        await asyncio.sleep(20)
        send = LeaderIO._send

        async def send_to_one(self: LeaderIO, outgoing: Outgoing) -> None:
            leader = self._context.peer_id
            commits = [to for to, message in outgoing if isinstance(message, Commit)]
            if len(commits) < 3 or told:
                await send(self, outgoing)
                return
            told.extend([leader, next(to for to in commits if to != leader)])
            await send(self, [pair for pair in outgoing if pair[0] == told[1]])
            await asyncio.sleep(0.1)
            asyncio.get_running_loop().create_task(simulation.kill(leader))

        monkeypatch.setattr(LeaderIO, "_send", send_to_one)
        before = len(simulation.merges)
        await asyncio.sleep(30)
        (unheard,) = set(simulation.peers) - set(told)
        first = next(m for peer, _, m in simulation.merges[before:] if peer == unheard)
        heard = next(m for peer, _, m in simulation.merges[before:] if peer == told[1])
        assert first.anchor.stamp == heard.anchor.stamp
        assert sum(span.elements for span in first.contributed) == 30
        reports = simulation.peers[unheard].reports
        assert "abandoned" in {report.outcome for report in reports}
        assert "fetched" in {report.outcome for report in reports}
        assert await simulation.settle(30)
        simulation.check_means()

    run_virtual(scenario)
