"""What becomes of messages on a pipeline's links, and what a connection carries."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atomresearch.simulation.link import (
    Lanes,
    PipelineLink,
    connection_bits_per_s,
    mean_recovery_s,
    opening_s,
    recovery_s,
)

# 1000 bytes take a second.
SLOW = PipelineLink(bits_per_s=8000, one_way_s=0.25)


def test_a_direction_carries_one_message_after_the_other() -> None:
    lanes = Lanes(2, SLOW)
    assert lanes.send(0, 1, 1000, 5.0) == (6.0, 6.25)
    assert lanes.free_s(0, 1) == 6.0
    assert lanes.send(0, 1, 500, 5.0) == (6.5, 6.75)
    # What comes the other way does not wait.
    assert lanes.send(1, 0, 1000, 5.0) == (6.0, 6.25)


def test_both_ends_links_must_be_free() -> None:
    lanes = Lanes(3, SLOW)
    lanes.send(0, 2, 1000, 0.0)
    assert lanes.free_s(1, 2) == 1.0
    assert lanes.free_s(0, 1) == 1.0
    assert lanes.free_s(2, 1) == 0.0
    assert lanes.send(1, 2, 1000, 0.0).left_s == 2.0


def test_an_idle_link_saves_up_a_burst_and_no_more() -> None:
    lanes = Lanes(2, PipelineLink(bits_per_s=8000, burst_s=0.5))
    # Half of the message is saved up; then nothing is, until time has passed.
    assert lanes.send(0, 1, 1000, 100.0).left_s == 100.5
    assert lanes.send(0, 1, 1000, 100.5).left_s == 101.5
    assert lanes.send(0, 1, 1000, 101.75).left_s == 102.5
    assert lanes.send(0, 1, 250, 200.0).left_s == 200.0


@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=20),
    pause_s=st.floats(0, 2),
    burst_s=st.floats(0, 1),
)
def test_no_link_carries_more_than_its_rate_and_one_burst(
    sizes: list[int], pause_s: float, burst_s: float
) -> None:
    lanes = Lanes(2, PipelineLink(bits_per_s=8000, burst_s=burst_s))
    now_s = left_s = 10.0
    for size in sizes:
        sent = lanes.send(0, 1, size, now_s)
        assert sent.left_s >= max(now_s, left_s)
        now_s = left_s = sent.left_s
        now_s += pause_s
    assert left_s - 10.0 >= sum(sizes) / 1000 - burst_s - 1e-6


def test_what_follows_a_lost_packet_waits_for_it() -> None:
    link = PipelineLink(bits_per_s=math.inf, one_way_s=0.5, loss_share=0.05)
    lanes = Lanes(2, link)
    # Ten packets each; one after the other, each as soon as the last has left.
    arrivals_s = [lanes.send(0, 1, 14480, 0.01 * index).arrived_s for index in range(200)]
    assert arrivals_s == sorted(arrivals_s)
    late_s = [at_s - 0.01 * index - 0.5 for index, at_s in enumerate(arrivals_s)]
    assert min(late_s) == pytest.approx(0.0)
    assert max(late_s) >= 1.0
    # Losses are the same ones each time, and each connection has its own.
    again = Lanes(2, link)
    assert [again.send(0, 1, 14480, 0.01 * index).arrived_s for index in range(200)] == arrivals_s


def test_without_loss_or_way_the_link_s_rate_counts() -> None:
    assert connection_bits_per_s(1e8, 0.1, 0.0) == 1e8
    assert connection_bits_per_s(1e8, 0.0, 0.01) == 0.99e8
    assert connection_bits_per_s(math.inf, 0.1, 0.01) < math.inf


def test_loss_on_a_long_way_leaves_little() -> None:
    # 12 packets of 1448 bytes in each round trip.
    lossy = connection_bits_per_s(1e8, 0.1, 0.01)
    assert lossy == pytest.approx(math.sqrt(150) * 1448 * 8 / 0.1)
    # Where windows are large, CUBIC's are larger than Reno's.
    long = connection_bits_per_s(1e10, 0.1, 1e-6)
    assert long > math.sqrt(1.5e6) * 1448 * 8 / 0.1


@pytest.mark.parametrize("way_s", [0.01, 0.1])
def test_more_loss_never_carries_more(way_s: float) -> None:
    rates = [connection_bits_per_s(1e9, way_s, share) for share in (0, 1e-5, 1e-4, 1e-3, 1e-2)]
    assert rates == sorted(rates, reverse=True)


def test_bbr_does_not_slow_down_for_losses() -> None:
    assert connection_bits_per_s(1e8, 0.1, 0.01, "bbr") == 0.99e8
    assert connection_bits_per_s(1e8, 0.1, 0.01, "reno") < 0.02e8


def test_a_new_connection_fills_the_link_by_and_by() -> None:
    # Ten packets, then twenty: the third round trip carries what is left.
    first = 8 * 10 * 1448 / 1e9
    expected_s = (0.1 - first) + (0.1 - 2 * first)
    assert opening_s(50 * 1448, 1e9, 0.1, 1) == pytest.approx(expected_s)
    # Several connections begin with as many windows.
    assert opening_s(50 * 1448, 1e9, 0.1, 5) == 0
    assert opening_s(50 * 1448, math.inf, 0.1, 1) == pytest.approx(0.2)


def test_a_short_way_or_a_slow_link_is_full_at_once() -> None:
    assert opening_s(1e9, 1e9, 0.0, 1) == 0
    assert opening_s(1e9, 1e6, 0.1, 1) == 0


@pytest.mark.parametrize("bits_per_s", [1e7, 1e8, 1e10])
def test_it_costs_at_most_the_round_trips_of_doubling(bits_per_s: float) -> None:
    lost_s = [opening_s(sent, bits_per_s, 0.05, 1) for sent in (1e4, 1e5, 1e6, 1e7)]
    assert lost_s == sorted(lost_s)
    assert lost_s[-1] <= 0.05 * math.log2(1e7 / 14480 + 1)


class Chance(random.Random):
    """Says what it is told, then never again that a packet is lost."""

    def __init__(self, *lost: bool) -> None:
        super().__init__()
        self.lost = list(lost)

    def random(self) -> float:
        return 0.0 if self.lost and self.lost.pop(0) else 1.0


def test_a_lost_packet_costs_a_round_trip_and_the_last_one_two() -> None:
    three = 3 * 1448
    assert recovery_s(three, 0.01, 0.1, Chance()) == 0
    assert recovery_s(three, 0.01, 0.1, Chance(True, False)) == pytest.approx(0.1)
    # Lost again; two at a time are mended together; the last one, and a message's only one.
    assert recovery_s(three, 0.01, 0.1, Chance(True, True, False)) == pytest.approx(0.2)
    assert recovery_s(three, 0.01, 0.1, Chance(True, False, True, False)) == pytest.approx(0.1)
    assert recovery_s(three, 0.01, 0.1, Chance(False, False, True)) == pytest.approx(0.2)
    assert recovery_s(1, 0.01, 0.1, Chance(True)) == pytest.approx(0.2)


@pytest.mark.parametrize("packets", [20, 200])
@pytest.mark.parametrize("share", [0.01, 0.2])
def test_on_average_it_is_what_chance_brings(packets: int, share: float) -> None:
    chance = random.Random(7)
    drawn_s = [recovery_s(packets * 1448, share, 1.0, chance) for _ in range(2000)]
    # The last packet's second round trip is not in the formula.
    assert mean_recovery_s(packets * 1448, share, 1.0) == pytest.approx(
        statistics.fmean(drawn_s), abs=share + 0.1
    )


def test_without_losses_nothing_is_mended() -> None:
    assert mean_recovery_s(1e9, 0.0, 0.1) == 0
    assert recovery_s(1e4, 0.0, 0.1, random.Random(0)) == 0
