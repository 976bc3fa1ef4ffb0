"""What a leader may make of weights: the others' less, as of newcomers, its own no more."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atomtrain.swarm.membership.guards import bounded_weights, led_weights, weights_flaw
from atomtrain.swarm.membership.standing import FULL_ROUNDS, Standing
from atomtrain.swarm.rounds import leader_state
from tests.support.swarm_virtual import Simulation, run_virtual


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
        assert not weights_flaw(weights, place, own, leader)


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
