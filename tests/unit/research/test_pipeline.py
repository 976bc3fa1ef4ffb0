"""A pipeline's step, event by event."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atomresearch.simulation.link import PipelineLink
from atomresearch.simulation.pipeline import Op, partition, simulate_step
from atomtrain.errors import ConfigError
from tests.support.pipeline_works import work

FAST = PipelineLink(bits_per_s=math.inf)


def test_one_rank_computes_all_the_time() -> None:
    step = simulate_step(work(1), FAST)
    assert step.step_s == step.busy_s[0] == 8 * 3.0


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_one_forward_one_backward_has_the_bubble_of_the_formula(ranks: int) -> None:
    # (M + K - 1) * (forward + backward): Narayanan et al. 2021 (arXiv 2104.04473), section 2.2.
    step = simulate_step(work(ranks), FAST)
    assert step.step_s == pytest.approx((8 + ranks - 1) * 3.0)


def test_one_forward_one_backward_is_the_textbook_order() -> None:
    step = simulate_step(work(2, micro_batches=3), FAST)
    first = [(op.backward, op.micro_batch) for op in step.orders[0]]
    assert first == [(False, 0), (False, 1), (True, 0), (False, 2), (True, 1), (True, 2)]


def test_a_slow_link_bounds_the_step() -> None:
    # 8 micro-batches of 100 bytes at 80 bit/s are 80 s one way.
    slow = simulate_step(work(2, boundary_bytes=100, in_flight=8), PipelineLink(bits_per_s=80))
    assert 80.0 <= slow.step_s <= 80.0 + 2 * 10.0 + 2 * 3.0


def test_more_in_flight_hides_a_long_way() -> None:
    far = PipelineLink(bits_per_s=math.inf, one_way_s=3.0)
    few, many = (simulate_step(work(2, in_flight=n), far).step_s for n in (2, 8))
    assert many < few


def test_chunks_shrink_the_bubble() -> None:
    whole = simulate_step(work(4, micro_batches=4), FAST).step_s
    halves = work(4, 2, micro_batches=4, forward_s=[0.5] * 8, backward_s=[1.0] * 8, in_flight=8)
    assert simulate_step(halves, FAST).step_s < whole


@given(
    ranks=st.integers(1, 4),
    chunks=st.integers(1, 3),
    micro_batches=st.integers(1, 6),
    in_flight=st.integers(1, 8),
    boundary_bytes=st.integers(0, 1000),
    one_way_s=st.floats(0, 5),
)
def test_every_operation_runs_once_after_what_it_needs(
    ranks: int, chunks: int, micro_batches: int, in_flight: int, boundary_bytes: int,
    one_way_s: float,
) -> None:  # fmt: skip
    given_work = work(
        ranks,
        chunks,
        micro_batches=micro_batches,
        in_flight=in_flight,
        boundary_bytes=boundary_bytes,
    )
    step = simulate_step(given_work, PipelineLink(bits_per_s=1000, one_way_s=one_way_s))
    everything = [op for order in step.orders for op in order]
    assert len(everything) == len(set(everything)) == 2 * micro_batches * ranks * chunks
    assert run_in_order(step.orders, ranks * chunks)
    assert step.step_s >= max(step.busy_s)


def run_in_order(orders: list[list[Op]], chunks: int) -> bool:
    """Return whether ranks that keep to their orders come to their ends, whatever the times."""
    done: set[Op] = set()
    positions = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while positions[rank] < len(order) and needs(order[positions[rank]], chunks) <= done:
                done.add(order[positions[rank]])
                positions[rank] += 1
                moved = True
    return positions == [len(order) for order in orders]


def needs(op: Op, chunks: int) -> set[Op]:
    backward, chunk, index = op
    if not backward:
        return {Op(False, chunk - 1, index)} if chunk else set()
    after = {Op(True, chunk + 1, index)} if chunk + 1 < chunks else set()
    return {Op(False, chunk, index), *after}


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="as many chunks on every rank"):
        work(2, forward_s=[1.0] * 3)
    with pytest.raises(ConfigError, match="at least 1"):
        work(2, in_flight=0)


@given(costs=st.lists(st.floats(0.01, 10), min_size=1, max_size=7), parts=st.integers(1, 4))
def test_parts_are_as_even_as_can_be(costs: list[float], parts: int) -> None:
    parts = min(parts, len(costs))
    bounds = partition(costs, parts)
    assert bounds[0] == 0
    assert bounds[-1] == len(costs)
    assert all(a < b for a, b in pairwise(bounds))
    assert worst(costs, bounds) == pytest.approx(least_worst(costs, parts))


def worst(costs: list[float], bounds: list[int]) -> float:
    return max(sum(costs[a:b]) for a, b in pairwise(bounds))


def least_worst(costs: list[float], parts: int) -> float:
    if parts == 1:
        return sum(costs)
    return min(
        max(sum(costs[:cut]), least_worst(costs[cut:], parts - 1))
        for cut in range(1, len(costs) - parts + 2)
    )
