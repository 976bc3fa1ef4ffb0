"""What becomes of messages on a pipeline's links."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atomresearch.simulation.link import Lanes, PipelineLink

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
