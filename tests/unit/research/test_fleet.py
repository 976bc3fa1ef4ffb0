"""Thousands of unlike peers, round by round."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from atomresearch.simulation.fleet import Averaging, Peers, simulate_fleet, unlike
from atomresearch.simulation.swarm import SwarmLink, SwarmWork, simulate_swarm
from atomtrain.errors import ConfigError

AVERAGING = Averaging(
    tokens_per_step=100,
    contribution_bytes=1000,
    mean_bytes=1000,
    fragments=2,
    local_steps=8,
)


def alike(count: int, *, step_s: float = 1.0, bits_per_s: float = 1e6, way_s: float = 0.0) -> Peers:
    ones = np.ones(count)
    return Peers(
        step_s=step_s * ones,
        up_bits_per_s=bits_per_s * ones,
        down_bits_per_s=bits_per_s * ones,
        one_way_s=way_s * ones,
    )


def test_peers_that_are_alike_and_stay_train_as_if_alone() -> None:
    run = simulate_fleet(alike(8), AVERAGING, 40)
    assert run.share_of_alone == pytest.approx(1.0)
    assert run.tokens_per_s == pytest.approx(800)
    assert run.members == 8
    assert run.lost_share == 0
    assert run.join_s == 0


def test_it_agrees_with_the_simulation_of_a_few_peers() -> None:
    """On a link that decides how long a round takes, both say how often a fragment is averaged."""
    slow = simulate_fleet(alike(4, bits_per_s=800.0), AVERAGING, 200)
    work = SwarmWork(
        step_s=[1.0] * 4, tokens_per_step=100, exchange_bytes=[1500, 1500], local_steps=8
    )
    few = simulate_swarm(work, SwarmLink(bits_per_s=800.0), 200)
    # They differ by where in their steps the peers are when a round begins: a step at most.
    assert slow.averaged_every_s == pytest.approx(few.averaged_every_s, rel=0.07)
    assert slow.sent_bytes_per_token == pytest.approx(few.sent_bytes_per_token, rel=0.07)


def test_one_group_of_all_leaves_no_drift_and_shuffled_groups_leave_little() -> None:
    whole = simulate_fleet(alike(256), AVERAGING, 200)
    assert whole.drift == pytest.approx(0, abs=1e-9)
    # v = (v + s) / G for the variance v left by groups of G, where s comes between two rounds.
    for group in (4, 16):
        run = simulate_fleet(alike(256), replace(AVERAGING, group_peers=group), 400)
        assert run.drift == pytest.approx(math.sqrt(1 / (group - 1)), rel=0.1)


def test_groups_bound_what_a_peer_sends() -> None:
    """Bytes hardly depend on the group; what does is how much each of many streams carries."""
    small = simulate_fleet(alike(64), replace(AVERAGING, group_peers=4), 20)
    large = simulate_fleet(alike(64), AVERAGING, 20)
    assert small.sent_bytes_per_token / large.sent_bytes_per_token == pytest.approx(
        (3 / 4) / (63 / 64), rel=0.02
    )


def test_several_groups_also_send_their_bases() -> None:
    with_bases = replace(AVERAGING, base_bytes=500, group_peers=8)
    several = simulate_fleet(alike(64), with_bases, 20)
    without = simulate_fleet(alike(64), replace(with_bases, base_bytes=0), 20)
    one = simulate_fleet(alike(8), with_bases, 20)
    assert several.sent_bytes_per_token == pytest.approx(
        1.25 * without.sent_bytes_per_token, rel=0.01
    )
    assert one.sent_bytes_per_token == pytest.approx(without.sent_bytes_per_token, rel=0.01)


def test_a_round_waits_for_the_slowest_of_its_group_and_training_for_nobody() -> None:
    peers = alike(4, bits_per_s=8000.0)
    slow = replace(peers, up_bits_per_s=np.array([8000.0, 8000.0, 8000.0, 2000.0]))
    usual, held_up = simulate_fleet(peers, AVERAGING, 50), simulate_fleet(slow, AVERAGING, 50)
    assert held_up.round_s > usual.round_s + 4
    assert held_up.tokens_per_s == pytest.approx(usual.tokens_per_s)
    # Three times as much time for the way out of the one: it is the busiest.
    assert held_up.busiest_up_share > usual.busiest_up_share


def test_who_comes_and_goes_is_missed_by_rounds_and_fetches_the_state() -> None:
    ordinary = alike(200)
    unsteady = replace(ordinary, stay_s=100.0, away_s=25.0)
    run = simulate_fleet(unsteady, replace(AVERAGING, state_bytes=125_000), 300)
    assert run.join_s == pytest.approx(1.0)  # 1 Mbit at 1 Mbit/s
    # 100 s of training, 25 s away and 1 s of fetching.
    assert run.share_of_alone == pytest.approx(100 / 126, rel=0.05)
    assert run.members == pytest.approx(200 * 100 / 126, rel=0.05)
    assert 0 < run.lost_share < 0.1


def test_the_same_seed_gives_the_same_run() -> None:
    peers = replace(alike(50), stay_s=60.0, away_s=10.0)
    first, second = (simulate_fleet(peers, AVERAGING, 50, seed=3) for _ in range(2))
    assert first == second
    assert simulate_fleet(peers, AVERAGING, 50, seed=4) != first


def test_unlike_values_spread_around_the_given_one() -> None:
    values = unlike(2.0, 20_000, 0.5, np.random.default_rng(0))
    assert float(np.median(values)) == pytest.approx(2.0, rel=0.02)
    assert float(np.log(values).std()) == pytest.approx(0.5, rel=0.03)
    assert unlike(2.0, 3, 0.0, np.random.default_rng(0)).tolist() == [2.0] * 3


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: alike(1), "at least two peers"),
        (lambda: alike(4, step_s=0.0), "above 0"),
        (lambda: replace(alike(4), stay_s=0.0), "above 0"),
        (lambda: replace(AVERAGING, fragments=0), ">= 1"),
        (lambda: replace(AVERAGING, group_peers=1), "groups must be of at least 2"),
        (lambda: simulate_fleet(alike(4), AVERAGING, 0), "at least 1 round"),
    ],
)
def test_nonsense_is_refused(make: object, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make()  # type: ignore[operator]
