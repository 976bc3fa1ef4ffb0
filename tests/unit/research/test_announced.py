"""PyTorch's 1F1B, plain and interleaved, over a transport that announces, event by event."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atomresearch.simulation.announced import (
    AnnouncedWork,
    actions_1f1b,
    actions_interleaved,
    operations,
    simulate_1f1b,
    simulate_interleaved,
)
from atomresearch.simulation.link import PipelineLink
from atomresearch.simulation.pipeline import Op, PipelineWork, simulate_step
from atomtrain.errors import ConfigError

FREE = PipelineLink(bits_per_s=math.inf)


def work(ranks: int = 2, micro_batches: int = 4, boundary_bytes: int = 1000) -> AnnouncedWork:
    return AnnouncedWork(
        forward_s=[1.0] * ranks,
        backward_s=[2.0] * ranks,
        micro_batches=micro_batches,
        boundary_bytes=boundary_bytes,
    )


def test_on_a_free_link_it_is_1f1b() -> None:
    # K - 1 micro-batches' bubble before and after the M that each rank computes.
    assert simulate_1f1b(work(3, 6), FREE) == pytest.approx((6 + 2) * 3.0)


def test_every_rank_does_everything_once_in_the_library_s_order() -> None:
    both = [actions_1f1b(work(), rank) for rank in range(2)]
    handed = [
        [(action.sends, action.receives) for action in actions if action.sends or action.receives]
        for actions in both
    ]
    first, last = Op(False, 1, 0), Op(True, 0, 3)
    # The first rank fills the pipeline; its second forward goes with the first backward's coming.
    assert handed[0][0] == ((first,), ())
    assert handed[0][1] == ((Op(False, 1, 1),), (Op(True, 0, 0),))
    assert handed[1][-1] == ((last,), ())
    for actions in both:
        assert sum(action.compute_s for action in actions) == 4 * 3.0


def test_a_backward_s_announcement_waits_behind_the_activations() -> None:
    # 8000 bits on 800 bit/s: 10 s a transfer, of which both directions could run at once.
    slow = PipelineLink(bits_per_s=800)
    many = work(2, 100)
    took_s = simulate_1f1b(many, slow)
    overlapped = PipelineWork(
        ranks=2, forward_s=[1.0] * 2, backward_s=[2.0] * 2, micro_batches=100, in_flight=4,
        boundary_bytes=1000,
    )  # fmt: skip
    assert took_s > 1.9 * simulate_step(overlapped, slow).step_s


@given(
    ranks=st.integers(1, 5),
    micro_batches=st.integers(1, 12),
    bits_per_s=st.floats(1e2, 1e9),
    one_way_s=st.floats(0, 1),
)
def test_no_link_beats_its_rate_and_nobody_waits_for_ever(
    ranks: int, micro_batches: int, bits_per_s: float, one_way_s: float
) -> None:
    link = PipelineLink(bits_per_s=bits_per_s, one_way_s=one_way_s)
    took_s = simulate_1f1b(work(ranks, micro_batches), link)
    assert took_s >= (micro_batches + ranks - 1) * 3.0 * (1 - 1e-9)
    if ranks > 1:
        assert took_s >= micro_batches * 8000 / bits_per_s
        assert took_s >= 2 * (ranks - 1) * one_way_s


@pytest.mark.parametrize(
    ("peers", "micro_batches", "bits_per_s", "round_trip_s", "bound", "measured"),
    [
        (2, 128, 10e6, 0.0, 8117, 1306.7),
        (2, 128, 8.816e6, 0.0, 8117, 1154.0),
        (2, 128, 1.8644e6, 0.0, 8117, 299.9),
        (2, 128, 0.8816e6, 0.0, 8117, 145.7),
        (2, 32, 0.18644e6, 0.0, 8117, 32.4),
        (2, 128, 10e6, 0.1, 8117, 415.5),
        (4, 64, 0.87755e6, 0.0, 7641, 70.4),
        (4, 32, 0.41494e6, 0.0, 7641, 33.6),
    ],
)
def test_tokens_per_second_are_those_that_were_measured(
    peers: int,
    micro_batches: int,
    bits_per_s: float,
    round_trip_s: float,
    bound: float,
    measured: float,
) -> None:
    """Rates of `Schedule1F1B` on shaped links, from results of `atom bench network`.

    Micro-batches of 64 tokens of width 192 in bfloat16; all peers together compute `bound` tokens
    a second without a network, here in equal stages.
    """
    stage_s = 64 / bound
    found = AnnouncedWork(
        forward_s=[stage_s / 3] * peers,
        backward_s=[stage_s * 2 / 3] * peers,
        micro_batches=micro_batches,
        boundary_bytes=64 * 192 * 2,
    )
    link = PipelineLink(bits_per_s=0.955 * bits_per_s, one_way_s=round_trip_s / 2)
    assert micro_batches * 64 / simulate_1f1b(found, link) == pytest.approx(measured, rel=0.12)


def test_the_order_is_that_of_the_paper() -> None:
    # Two ranks of two chunks: chunk 0 of two micro-batches, then chunk 2, and so on.
    first, _ = operations(4, 2, 4)
    forwards = [(op.chunk, op.micro_batch) for op in first if not op.backward]
    assert forwards == [(0, 0), (0, 1), (2, 0), (2, 1), (0, 2), (0, 3), (2, 2), (2, 3)]
    assert [op.backward for op in first[:6]] == [False] * 5 + [True]
    assert first[5] == Op(True, 2, 0)


def test_on_a_free_link_the_bubble_is_that_of_the_paper() -> None:
    # (K - 1) (f + b) / V beside M (f + b), with V chunks of f / V and b / V each.
    step_s = simulate_interleaved(work(4, 8), 2, FREE)
    assert step_s == pytest.approx(8 * 2 * 3.0 + 3.0)


@given(
    ranks=st.integers(1, 4),
    each=st.integers(1, 3),
    turns=st.integers(1, 3),
    bits_per_s=st.floats(1e2, 1e9),
    one_way_s=st.floats(0, 1),
)
def test_everything_is_done_once_and_no_link_beats_its_rate(
    ranks: int, each: int, turns: int, bits_per_s: float, one_way_s: float
) -> None:
    found = work(ranks * each, ranks * turns)
    programs = actions_interleaved(found, ranks)
    for actions in programs:
        computed = sum(action.compute_s for action in actions)
        assert computed == pytest.approx(each * ranks * turns * 3.0)
    received = [op for actions in programs for action in actions for op in action.receives]
    sent = [op for actions in programs for action in actions for op in action.sends]
    assert sorted(received) == sorted(sent)
    took_s = simulate_interleaved(
        found, ranks, PipelineLink(bits_per_s=bits_per_s, one_way_s=one_way_s)
    )
    assert took_s >= each * ranks * turns * 3.0 * (1 - 1e-9)
    if ranks > 1:
        # The first rank sends forward from each chunk, and backward from all but the first one.
        sends = (2 * each - 1) * ranks * turns
        assert took_s >= sends * 8000 / bits_per_s * (1 - 1e-9)


def test_a_slower_link_is_never_faster() -> None:
    times_s = [
        simulate_interleaved(work(4, 8), 2, PipelineLink(bits_per_s=rate))
        for rate in (1e3, 1e4, 1e5, 1e6)
    ]
    assert all(slower >= faster for slower, faster in pairwise(times_s))


@pytest.mark.parametrize(("chunks", "micro_batches"), [(3, 4), (4, 5)])
def test_what_does_not_spread_over_the_ranks_is_refused(chunks: int, micro_batches: int) -> None:
    with pytest.raises(ConfigError, match="whole turns of all ranks"):
        operations(chunks, 2, micro_batches)
