"""A connection with BBR: it fills a lossy link, but slows messages with pauses between them."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest

from atomresearch.simulation.bbr import BbrConnection
from atomresearch.simulation.link import BBR, CUBIC, Lanes, PipelineLink
from atomresearch.simulation.pipeline import PipelineWork, simulate_step
from atomresearch.simulation.replay import replay

RATE_BITS_PER_S = 93.6e6
TRIP_S = 0.03
MESSAGE_BYTES = 50_176
GAP_S = 0.045


def connection(loss_share: float, seed: int = 0) -> BbrConnection:
    return BbrConnection(RATE_BITS_PER_S, TRIP_S, loss_share, random.Random(seed))


def latencies_s(loss_share: float, messages: int = 250) -> list[float]:
    """Of messages with pauses between them, as 9 Mbit/s of a link that carries 93.6."""
    found = []
    for seed in range(3):
        of_seed = connection(loss_share, seed)
        found += [of_seed.send(MESSAGE_BYTES, GAP_S * k) - GAP_S * k for k in range(messages)]
    return sorted(found)


@pytest.mark.parametrize("loss_share", [0.0, 0.01])
def test_much_data_fills_the_link_whether_packets_get_lost_or_not(loss_share: float) -> None:
    sent_bytes = 30e6
    took_s = connection(loss_share).send(sent_bytes, 0.0)
    rate = 8 * sent_bytes / took_s
    assert 0.85 * RATE_BITS_PER_S <= rate <= RATE_BITS_PER_S


def test_messages_with_pauses_are_spread_over_them_where_packets_get_lost() -> None:
    # Measured with Linux on 100 Mbit/s, 30 ms, 1% lost, 250 such messages each way.
    measured_s = {0.1: 0.0362, 0.25: 0.0412, 0.5: 0.0503, 0.75: 0.0660}
    found_s = latencies_s(0.01)
    for share, known_s in measured_s.items():
        assert found_s[int(share * len(found_s))] == pytest.approx(known_s, rel=0.15)
    assert statistics.fmean(found_s) == pytest.approx(0.0647, rel=0.15)


def test_the_same_messages_are_hardly_slowed_where_nothing_gets_lost() -> None:
    # Measured as above, without losses: the estimate stays that of the first ones.
    assert statistics.median(latencies_s(0.0)) == pytest.approx(0.0208, rel=0.15)


def test_messages_arrive_in_their_order_and_never_sooner_than_the_link_allows() -> None:
    lossy = connection(0.2)
    before_s = 0.0
    for index in range(100):
        now_s = 0.01 * index
        arrived_s = lossy.send(MESSAGE_BYTES, now_s)
        assert arrived_s >= max(before_s, now_s + 8 * MESSAGE_BYTES / RATE_BITS_PER_S + TRIP_S / 2)
        before_s = arrived_s


@pytest.mark.parametrize("bits_per_s", [1e5, 1e6, 1e7])
def test_what_waits_in_a_slow_link_s_queue_is_not_taken_for_lost(bits_per_s: float) -> None:
    slow = BbrConnection(bits_per_s, TRIP_S, 0.01, random.Random(1))
    arrived_s = [slow.send(4_000, 0.004 * index) for index in range(200)][-1]
    assert 1.0 <= arrived_s / (8 * 200 * 4_000 / bits_per_s) <= 1.5


def test_a_pipeline_waits_for_bbr_where_packets_get_lost() -> None:
    work = PipelineWork(
        ranks=2,
        forward_s=[0.0145, 0.0113],
        backward_s=[0.0290, 0.0226],
        micro_batches=32,
        in_flight=8,
        boundary_bytes=MESSAGE_BYTES,
    )
    link = PipelineLink(
        bits_per_s=0.99 * RATE_BITS_PER_S,
        one_way_s=TRIP_S / 2,
        loss_share=0.01,
        congestion_control=BBR,
    )
    orders = simulate_step(work, replace(link, loss_share=0.0)).orders
    took_s = replay(work, link, orders, cores=2)
    # Real processes that slept instead of computing took 2.0 to 2.9 s, and 1.5 without losses.
    assert 1.9 <= took_s <= 2.4
    assert replay(work, replace(link, loss_share=0.0), orders, cores=2) < 1.5
    assert took_s == replay(work, link, orders, cores=2)


def test_connections_of_a_pair_have_a_pace_each() -> None:
    link = PipelineLink(
        bits_per_s=RATE_BITS_PER_S, one_way_s=TRIP_S / 2, loss_share=0.01, congestion_control=BBR
    )
    lanes = Lanes(2, link)
    there = [lanes.send(0, 1, MESSAGE_BYTES, GAP_S * k).arrived_s for k in range(50)]
    back = lanes.send(1, 0, MESSAGE_BYTES, 50 * GAP_S).arrived_s
    assert there == sorted(there)
    # New: its first window is ten packets.
    assert back - 50 * GAP_S > TRIP_S
    cubic = Lanes(2, replace(link, congestion_control=CUBIC))
    assert cubic.send(0, 1, MESSAGE_BYTES, 0.0).arrived_s < back - 50 * GAP_S
