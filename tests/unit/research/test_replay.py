"""A pipeline's step on ranks that share processor cores."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atomresearch.simulation.link import PipelineLink
from atomresearch.simulation.pipeline import PipelineWork, simulate_step
from atomresearch.simulation.replay import replay
from atomtrain.errors import ConfigError
from tests.support.pipeline_works import work

FREE = PipelineLink(bits_per_s=math.inf)


@given(
    chunks=st.integers(1, 3),
    micro_batches=st.integers(1, 8),
    in_flight=st.integers(1, 8),
    boundary_bytes=st.integers(0, 1000),
    one_way_s=st.floats(0, 5),
)
def test_with_a_core_each_it_is_the_simulation_that_found_the_orders(
    chunks: int, micro_batches: int, in_flight: int, boundary_bytes: int, one_way_s: float
) -> None:
    given_work = work(
        2,
        chunks,
        micro_batches=micro_batches,
        in_flight=in_flight,
        boundary_bytes=boundary_bytes,
    )
    link = PipelineLink(bits_per_s=1000, one_way_s=one_way_s)
    step = simulate_step(given_work, link)
    assert replay(given_work, link, step.orders, 2) == pytest.approx(step.step_s)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_on_one_core_all_work_takes_its_sum(ranks: int) -> None:
    given_work = work(ranks)
    step = simulate_step(given_work, FREE)
    assert replay(given_work, FREE, step.orders, 1) == pytest.approx(ranks * 8 * 3.0)


def test_ranks_that_wait_for_the_network_leave_their_share_to_others() -> None:
    # Each transfer takes 50 s; computing, even one after the other, is nothing beside it.
    slow = PipelineLink(bits_per_s=16)
    given_work = work(2, boundary_bytes=100)
    orders = simulate_step(given_work, slow).orders
    alone, shared = (replay(given_work, slow, orders, cores) for cores in (2, 1))
    assert alone <= shared <= 1.1 * alone


@given(cores=st.floats(0.1, 8), ranks=st.integers(1, 4), bits_per_s=st.floats(1e2, 1e6))
def test_less_than_the_work_or_the_link_takes_it_never_takes(
    cores: float, ranks: int, bits_per_s: float
) -> None:
    given_work = work(ranks, boundary_bytes=100)
    link = PipelineLink(bits_per_s=bits_per_s)
    step = simulate_step(given_work, link)
    took_s = replay(given_work, link, step.orders, cores)
    assert took_s >= ranks * 8 * 3.0 / min(cores, ranks) * (1 - 1e-9)
    if ranks > 1:
        assert took_s >= 8 * 800 / bits_per_s


@pytest.mark.parametrize(("orders", "cores"), [([[]], 1), ([[], []], 0)])
def test_what_makes_no_sense_is_refused(orders: list[list[object]], cores: float) -> None:
    with pytest.raises(ConfigError, match="give one for each rank"):
        replay(work(2), FREE, orders, cores)  # type: ignore[arg-type]


@pytest.mark.parametrize(("in_flight", "measured_s"), [(4, 5.54), (8, 4.82)])
def test_connections_share_the_link_of_a_rank_in_the_middle(
    in_flight: int, measured_s: float
) -> None:
    # Measured with processes that slept instead of computing: medians of three steps on 2.33 Mbit/s
    # of a busy machine; sleeping and waking up is in them.
    chain = PipelineWork(
        ranks=4,
        forward_s=[0.002, 0.002, 0.002, 0.003],
        backward_s=[0.004, 0.004, 0.004, 0.006],
        micro_batches=48,
        in_flight=in_flight,
        boundary_bytes=12_544,
    )
    link = PipelineLink(bits_per_s=0.936 * 2.33e6, burst_s=0.011)
    step = simulate_step(chain, link)
    shared_s = replay(chain, link, step.orders, cores=4)
    assert 0.93 * measured_s <= shared_s <= measured_s
    if in_flight == 4:  # message after message they would take a fifth less
        assert step.step_s < 0.87 * shared_s
