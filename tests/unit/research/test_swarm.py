"""A swarm's rounds, one after the other."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atomresearch.simulation.swarm import SwarmLink, SwarmWork, simulate_swarm
from atomtrain.errors import ConfigError


def work(**changes: object) -> SwarmWork:
    fields: dict[str, object] = {
        "step_s": [1.0, 1.0],
        "tokens_per_step": 100,
        "exchange_bytes": [1000, 1000],
        "local_steps": 8,
    }
    return SwarmWork(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_fast_link_averages_every_fragment_once_in_its_steps() -> None:
    run = simulate_swarm(work(), SwarmLink(bits_per_s=math.inf), rounds=1000)
    assert run.averaged_every_s == pytest.approx(8.0, rel=0.01)
    assert run.averaged_every_tokens == pytest.approx(1600.0, rel=0.01)


def test_a_slow_link_averages_less_often_and_costs_no_tokens() -> None:
    fast = simulate_swarm(work(), SwarmLink(bits_per_s=math.inf))
    # A fragment's 8000 bits take 80 s.
    slow = simulate_swarm(work(), SwarmLink(bits_per_s=100))
    assert slow.tokens_per_s == fast.tokens_per_s == 200.0
    assert slow.averaged_every_s == pytest.approx(2 * 80, rel=0.1)


def test_encoding_makes_rounds_longer_and_costs_no_tokens() -> None:
    link = SwarmLink(bits_per_s=1000)
    free, paid = (simulate_swarm(work(codec_s=each), link) for each in (0.0, 3.0))
    assert paid.round_s == pytest.approx(free.round_s + 3.0)
    assert paid.tokens_per_s == free.tokens_per_s


def test_new_streams_cost_round_trips_and_begin_slowly() -> None:
    near, far = (
        simulate_swarm(work(), SwarmLink(bits_per_s=1e9, one_way_s=way_s)) for way_s in (0.0, 0.02)
    )
    # A step until the snapshot, less two ways until the invitation; four ways of messages; streams
    # that are open both ways after five, and one each for a contribution and its mean: 500 bytes go
    # at once.
    assert near.round_s == pytest.approx(1.0, abs=1e-3)
    assert far.round_s == pytest.approx(1.0 - 2 * 0.02 + (4 + 5 + 2) * 0.02, abs=1e-3)


def test_means_go_over_streams_that_contributions_have_opened() -> None:
    megabyte = work(exchange_bytes=[10**6, 10**6])
    little, much = (
        simulate_swarm(each, SwarmLink(bits_per_s=1e12, one_way_s=0.02)).round_s
        for each in (work(), megabyte)
    )
    # A megabyte is seven windows, of ten packets, twenty, forty and so on: six round trips more
    # than one window. Half of it twice, each time from the beginning, would be ten.
    assert much == pytest.approx(little + 6 * 0.04, abs=1e-3)


def test_losses_cost_round_trips_at_the_end_of_what_is_exchanged() -> None:
    much = work(exchange_bytes=[10**6, 10**6])
    clean, lossy = (
        simulate_swarm(much, SwarmLink(bits_per_s=1e9, one_way_s=0.05, loss_share=share)).round_s
        for share in (0.0, 0.01)
    )
    # Of 345 packets some are lost, hardly any of them three times: contributions, then means.
    assert clean + 2 * 0.09 < lossy < clean + 2 * 0.2


def test_what_is_sent_is_what_both_peers_exchange() -> None:
    run = simulate_swarm(work(), SwarmLink(bits_per_s=math.inf), rounds=1000)
    assert run.sent_bytes_per_token == pytest.approx(2 * 2000 / 1600, rel=0.01)


def test_a_slow_peer_makes_fewer_tokens_and_no_other_wait() -> None:
    run = simulate_swarm(work(step_s=[1.0, 3.0]), SwarmLink(bits_per_s=math.inf))
    assert run.tokens_per_s == pytest.approx(100 + 100 / 3)
    # A round waits for its snapshot, which the fast peer does not notice.
    assert run.round_s <= 3.0


@given(
    step_s=st.lists(st.floats(0.01, 10), min_size=2, max_size=6),
    fragments=st.lists(st.integers(1, 10**6), min_size=1, max_size=5),
    local_steps=st.integers(1, 50),
    bits_per_s=st.floats(1e2, 1e9),
    one_way_s=st.floats(0, 1),
)
def test_no_link_beats_its_rate(
    step_s: list[float], fragments: list[int], local_steps: int, bits_per_s: float, one_way_s: float
) -> None:
    given_work = work(step_s=step_s, exchange_bytes=fragments, local_steps=local_steps)
    run = simulate_swarm(given_work, SwarmLink(bits_per_s=bits_per_s, one_way_s=one_way_s))
    each_s = [8 * n / bits_per_s for n in fragments]
    assert run.averaged_every_s >= sum(each_s) * (1 - 1e-9)
    # Four ways of messages, and an exchange of a stream's opening, a contribution and a mean.
    assert run.round_s >= 11 * one_way_s
    least_steps = len(fragments) * max(1, local_steps // len(fragments))
    assert run.averaged_every_s >= (least_steps - 1) * min(step_s) * (1 - 1e-6)


def test_what_is_no_swarm_is_refused() -> None:
    for changes in ({"step_s": [1.0]}, {"exchange_bytes": []}, {"local_steps": 0}):
        with pytest.raises(ConfigError):
            work(**changes)
