"""PyTorch's interleaved 1F1B over a transport that announces."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atomresearch.simulation.announced import AnnouncedWork
from atomresearch.simulation.interleaved import (
    actions_interleaved,
    operations,
    simulate_interleaved,
)
from atomresearch.simulation.link import PipelineLink
from atomresearch.simulation.pipeline import Op
from atomtrain.errors import ConfigError

FREE = PipelineLink(bits_per_s=math.inf)


def work(chunks: int, micro_batches: int, boundary_bytes: int = 1000) -> AnnouncedWork:
    return AnnouncedWork(
        forward_s=[1.0] * chunks,
        backward_s=[2.0] * chunks,
        micro_batches=micro_batches,
        boundary_bytes=boundary_bytes,
    )


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
