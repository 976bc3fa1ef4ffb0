"""What a leader may make of weights: the others' less, as of newcomers, its own no more."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atombench.virtual.clock import run_virtual
from atomtrain.swarm.membership.guards import bounded_weights, led_weights, weights_flaw
from atomtrain.swarm.membership.standing import FULL_ROUNDS, Standing
from atomtrain.swarm.rounds import leader_state
from tests.support.swarm_virtual import Simulation


@pytest.mark.parametrize(
    ("weights", "counting"),
    [
        ((90, 10), (90, 10)),  # of two nobody knows who claims too much
        ((90, 10, 0), (90, 10, 0)),
        ((90, 10, 20), (10, 10, 20)),
        ((90, 10, 20, 30), (20, 10, 20, 30)),
        ((5, 10, 20, 30), (5, 10, 20, 30)),
        ((0, 10, 20, 30), (0, 10, 20, 30)),
        ((900, 10, 10, 900), (10, 10, 10, 100)),
    ],
)
def test_who_leads_weighs_at_most_the_median_of_the_others(
    weights: tuple[int, ...], counting: tuple[int, ...]
) -> None:
    assert led_weights(weights, 0) == counting
    assert led_weights(counting, 0) == counting
    assert led_weights(weights, None) == bounded_weights(weights)


@settings(max_examples=200)
@given(st.data())
def test_no_member_finds_fault_with_an_honest_leader(data: st.DataObject) -> None:
    claimed = data.draw(st.lists(st.integers(0, 10**6), min_size=2, max_size=9))
    members = [f"p{place}" for place in range(len(claimed))]
    standing = Standing()
    for member in members:
        for round_index in range(data.draw(st.integers(0, FULL_ROUNDS))):
            standing.observe(member, round_index, rejected=False)
    leader = data.draw(st.integers(0, len(claimed) - 1))
    lowered = standing.lowered(members[leader], members, bounded_weights(claimed))
    weights = led_weights(lowered, leader)
    for place, own in enumerate(claimed):
        known = data.draw(st.integers(0, standing._of(members[place]).accepted))
        assert not weights_flaw(weights, place, own, leader, known)


@pytest.mark.parametrize(("known", "least"), [(0, 11), (1, 22), (4, 55), (7, 88), (8, 100)])
def test_a_member_that_its_leader_knows_is_lowered_no_further_than_that(
    known: int, least: int
) -> None:
    accomplices = (100, 100, 100)
    assert not weights_flaw((*accomplices, least), 3, 100, 0, known)
    why = weights_flaw((*accomplices, least - 1), 3, 100, 0, known)
    assert "further than a newcomer's" in why
    assert not known or f"counted in {known} rounds" in why


@settings(max_examples=200)
@given(st.lists(st.sampled_from(["accepted", "rejected", "away"]), max_size=80))
def test_no_member_thinks_that_an_honest_leader_knows_it_better_than_it_does(
    rounds: list[str],
) -> None:
    """What an owner's means show of it, against what it has noted itself."""
    owner, member = Standing(), Standing()
    for index, what in enumerate(rounds):
        excluded = "member" in owner.excluded(index)
        if what != "away":
            counted = what == "accepted" and not excluded
            if not excluded:
                owner.observe("member", index, rejected=not counted)
            member.observe_owner("owner", counted=counted)
        assert member.counts_me("owner") <= owner._of("member").accepted


def test_who_is_left_out_of_one_mean_in_six_is_known_all_the_same() -> None:
    member = Standing()
    for index in range(60):
        member.observe_owner("owner", counted=index % 6 > 0)
    assert member.counts_me("owner") >= 4


@pytest.mark.parametrize(
    ("weights", "why"),
    [
        ((90, 100, 110, 101), "changed"),
        ((90, 0, 100, 110), "changed"),
        ((100, 10, 100, 100), "further than a newcomer's"),
        ((101, 100, 100, 100), "too much"),
        ((20, 100, 10, 10), "too much"),
        ((2000, 100, 100, 100), "too much"),
    ],
)
def test_what_a_member_refuses(weights: tuple[int, ...], why: str) -> None:
    place = 3 if weights[3] == 101 else 1
    assert why in weights_flaw(weights, place, 100, 0)


@pytest.mark.slow
def test_rounds_of_a_leader_that_takes_more_for_itself_come_to_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It says that it has all tokens, and others next to none; they average where others lead."""
    honest = leader_state.led_weights

    async def scenario() -> None:
        simulation = Simulation((60, 30), 5, 0.02)
        for name in ("a", "b", "c", "greedy"):
            await simulation.add(name, step_s=0.5)
        await asyncio.sleep(10)
        call = leader_state.LeaderRound._fix_group

        def fix_group(self: leader_state.LeaderRound, now_s: float) -> leader_state.Outgoing:
            def greedy(weights: list[int], leader: int | None) -> tuple[int, ...]:
                return tuple(w if i == leader else 1 for i, w in enumerate(weights))

            lies = self.call.leader == "greedy"
            monkeypatch.setattr(leader_state, "led_weights", greedy if lies else honest)
            return call(self, now_s)

        monkeypatch.setattr(leader_state.LeaderRound, "_fix_group", fix_group)
        a = simulation.peers["a"]
        seen = len(a.reports)
        await asyncio.sleep(25)
        reports = a.reports[seen:]
        refused = [r for r in reports if "the leader l" in r.reason]
        averaged = [r for r in reports if len(r.contributors) >= 3]
        assert refused
        assert len(averaged) > len(refused)
        for report in averaged:
            assert max(report.weights) <= 10 * min(report.weights)

    run_virtual(scenario)


@pytest.mark.slow
def test_a_leader_that_lowers_whom_it_knows_and_not_its_accomplice_is_not_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its rounds come to nothing for the others; they average where others lead."""
    honest = Standing.lowered

    def unfair(
        self: Standing, me: str, members: Sequence[str], weights: Sequence[int]
    ) -> tuple[int, ...]:
        if me != "unfair":
            return honest(self, me, members, weights)
        friends = ("unfair", "accomplice")
        return tuple(
            weight if member in friends else max(1, weight // (1 + FULL_ROUNDS))
            for member, weight in zip(members, weights, strict=True)
        )

    async def scenario() -> None:
        simulation = Simulation((60, 30), 5, 0.02)
        for name in ("a", "b", "c", "unfair", "accomplice"):
            await simulation.add(name, step_s=0.5)
        await asyncio.sleep(18)
        others = [simulation.peers[name] for name in "abc"]
        for peer in others:
            assert peer.service.context.standing.counts_me("unfair") == FULL_ROUNDS
        monkeypatch.setattr(Standing, "lowered", unfair)
        await asyncio.sleep(2)
        seen, before = [len(peer.reports) for peer in others], len(simulation.merges)
        await asyncio.sleep(15)
        for peer, known in zip(others, seen, strict=True):
            reports = peer.reports[known:]
            assert any("which it has counted in 8 rounds" in r.reason for r in reports)
            assert any(len(r.contributors) >= 4 for r in reports)
        for name, _, merge in simulation.merges[before:]:
            led_by = merge.anchor.origin.round_id.split("-")[1]
            assert name not in "abc" or not merge.contributed or led_by != "unfair"

    run_virtual(scenario)
