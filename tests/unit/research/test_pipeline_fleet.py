"""Pipelines of unlike peers that come and go."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from atomresearch.simulation.compare import Site, pipelines
from atomresearch.simulation.fleet import Peers
from atomresearch.simulation.link import PipelineLink
from atomresearch.simulation.pipeline_fleet import simulate_pipelines
from atomtrain.errors import ConfigError
from tests.support.pipeline_works import LAYER, site

FAST = PipelineLink(bits_per_s=1e12)
HOUR_S = 3600.0


def alike(count: int = 8, *, bits_per_s: float = 1e12) -> Peers:
    ones = np.ones(count)
    return Peers(
        step_s=32.0 * ones,
        up_bits_per_s=bits_per_s * ones,
        down_bits_per_s=bits_per_s * ones,
        one_way_s=0.0 * ones,
    )


TIGHT = 4 * 16_000 + 300_000
"""Device memory for half of the layers."""
LIGHT = LAYER._replace(kept_bytes=10, boundary_values=10, boundary_rows=1)
"""Of which parameters alone take memory."""


def one_layer_each(peers: int, parameters: int) -> Site:
    """Return devices that hold one layer of eight: only eight stages fit."""
    return site(
        peers,
        layers=[LIGHT._replace(parameters=parameters)] * 8,
        device_memory_bytes=16 * parameters + 1000,
    )


@pytest.mark.parametrize("bits_per_s", [1e12, 1e6, 1e3])
def test_peers_that_are_alike_and_stay_reach_what_the_best_pipeline_does(bits_per_s: float) -> None:
    link = PipelineLink(bits_per_s=bits_per_s)
    run = simulate_pipelines(site(8), alike(bits_per_s=bits_per_s), link, HOUR_S)
    assert run is not None
    best = max(pipelines(site(8), link), key=lambda choice: choice.tokens_per_s)
    assert run.tokens_per_s == pytest.approx(best.tokens_per_s)
    assert (run.stages, run.pipelines) == (best.stages, best.pipelines)
    assert run.share_of_staying == pytest.approx(1.0)
    assert run.stopped_share == run.losses == 0


def test_the_slowest_stage_sets_the_pace_of_its_own_pipeline_only() -> None:
    slow = replace(alike(), step_s=np.array([32.0] * 7 + [64.0]))
    run = simulate_pipelines(site(8), slow, FAST, HOUR_S)
    usual = simulate_pipelines(site(8), alike(), FAST, HOUR_S)
    assert run is not None
    assert usual is not None
    # One of four pipelines at half the pace.
    assert run.stages == 2
    assert run.tokens_per_s == pytest.approx(usual.tokens_per_s * 3.5 / 4)


def test_a_spare_peer_is_the_slowest() -> None:
    nine = replace(alike(9), step_s=np.array([64.0] + [32.0] * 8))
    run = simulate_pipelines(site(9), nine, FAST, HOUR_S)
    usual = simulate_pipelines(site(8), alike(), FAST, HOUR_S)
    assert run is not None
    assert usual is not None
    assert run.tokens_per_s == pytest.approx(usual.tokens_per_s)


def test_sending_is_limited_by_the_narrow_way_of_each_peer() -> None:
    link = PipelineLink(bits_per_s=1e3)
    even = alike(bits_per_s=1e3)
    rates = []
    for narrow in (
        even,
        replace(even, up_bits_per_s=0.5e3 * np.ones(8)),
        replace(even, down_bits_per_s=0.5e3 * np.ones(8)),
        replace(even, up_bits_per_s=np.array([0.5e3] * 2 + [1e3] * 6)),
        replace(even, up_bits_per_s=2e3 * np.ones(8)),
    ):
        run = simulate_pipelines(site(8), narrow, link, HOUR_S)
        assert run is not None
        assert run.stages == 2
        rates.append(run.tokens_per_s / 8)
    usual, up, down, two, wide = rates
    assert up == down == pytest.approx(usual / 2)
    assert two == pytest.approx(usual * (3 + 0.5) / 4)
    assert wide == pytest.approx(usual)


def test_without_a_spare_everybody_waits_for_who_is_away() -> None:
    lasting_s = 400 * HOUR_S
    unsteady = replace(alike(), stay_s=HOUR_S, away_s=HOUR_S / 4)
    run = simulate_pipelines(one_layer_each(8, 1000), unsteady, FAST, lasting_s)
    assert run is not None
    assert run.stages == 8
    # Each is here for four fifths of the time; the pipeline is complete when all eight are.
    assert run.pipelines == pytest.approx(0.8**8, rel=0.2)
    assert run.share_of_staying == pytest.approx(run.pipelines, rel=0.05)
    assert run.losses > 100


def test_a_spare_takes_the_place_and_fetches_the_stage() -> None:
    """With as many spare peers as stages, what is left of the loss is fetching and doing again."""
    lasting_s = 400 * HOUR_S
    shares = []
    for parameters in (1000, 10_000_000):
        given = one_layer_each(16, parameters)
        unsteady = replace(alike(16), stay_s=HOUR_S, away_s=HOUR_S / 4)
        slow = replace(unsteady, down_bits_per_s=1e6 * np.ones(16))
        run = simulate_pipelines(given, slow, PipelineLink(bits_per_s=1e6), lasting_s)
        assert run is not None
        assert run.stages == 8
        shares.append(run.stopped_share)
    little, much = shares
    # Half a step is about 105 s, 40 MB at 1 Mbit/s take 320 s, and eight peers leave in 3600 s.
    assert 0 < little < 0.35
    assert much > little + 0.15


def test_the_number_of_stages_is_the_best_for_peers_that_come_and_go() -> None:
    steady = simulate_pipelines(site(8), alike(), FAST, HOUR_S)
    few = simulate_pipelines(
        site(8), replace(alike(), stay_s=HOUR_S, away_s=HOUR_S), FAST, 50 * HOUR_S
    )
    tight = simulate_pipelines(
        site(8, device_memory_bytes=TIGHT), replace(alike(), stay_s=HOUR_S), FAST, 50 * HOUR_S
    )
    assert steady is not None
    assert few is not None
    assert tight is not None
    assert few.stages <= steady.stages
    assert 0 < few.tokens_per_s < steady.tokens_per_s
    assert tight.tokens_per_s <= steady.tokens_per_s


def test_it_is_never_better_than_everybody_at_work_and_alike_for_a_seed() -> None:
    random = np.random.default_rng(5)
    unlike = replace(
        alike(40), step_s=32.0 * np.exp(random.normal(0, 0.3, 40)), stay_s=HOUR_S, away_s=900.0
    )
    runs = [simulate_pipelines(site(40), unlike, FAST, 20 * HOUR_S, seed) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert runs[0] is not None
    everybody = float((100 / (8 * 3.0 * unlike.step_s / 32.0)).sum())
    assert 0.3 * everybody < runs[0].tokens_per_s < everybody
    assert math.isfinite(runs[0].share_of_staying)


def test_what_fits_nowhere_or_makes_no_sense_is_said() -> None:
    assert simulate_pipelines(site(8, device_memory_bytes=16_000), alike(), FAST, HOUR_S) is None
    with pytest.raises(ConfigError, match="give 8 peers"):
        simulate_pipelines(site(8), alike(9), FAST, HOUR_S)
    with pytest.raises(ConfigError, match="more than 0 s"):
        simulate_pipelines(site(8), alike(), FAST, 0.0)
