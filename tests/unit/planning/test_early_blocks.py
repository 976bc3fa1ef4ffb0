"""Blocks that come in pieces: how large these are, and when the planner lets them."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from atomtrain.planning import Layout, Request, make_plan
from atomtrain.planning.plan.layout import ALIGNMENT_BYTES
from atomtrain.planning.search.search import least_budget_bytes
from tests.unit.planning.test_search import Kind, Problem, build

BLOCK = Kind(640, 3.5, 10.0, 64, 64, 64, (True, False), True)
"""Loads in a second."""
HEAD = BLOCK._replace(parameters=6400)
"""Loads in ten seconds, more than a block computes."""
PROBLEM = Problem(
    (BLOCK, HEAD, BLOCK, BLOCK), (0, 0, 0, 0, 1), (), 1, 2560.0, 1e6, 1e6, 0.0, 1.0
)  # fmt: skip
REQUEST = Request(
    micro_batches=1, slots=2, resident=(4,), device_blocks=(), activations="recompute"
)


def test_pieces_follow_each_other_and_are_of_whole_units() -> None:
    problem = PROBLEM._replace(shared=((64 * 13, 2, 3),))
    layout = Layout(build(problem).chain)
    for block, first, last_user in ((4, 0, 4), (4, 1, 4), (5, 0, 2), (5, 1, 2), (0, 0, 0)):
        pieces = [layout.early_range(block, i, i + 1, first) for i in range(first, 5)]
        assert pieces[0][0] == 0
        assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
        assert pieces[-1][1] == layout.block_bytes(block)
        assert pieces[last_user - first][1] == layout.block_bytes(block)
        assert all(at % ALIGNMENT_BYTES == 0 for piece in pieces for at in piece)
        sizes = [stop - start for start, stop in pieces[: last_user - first + 1]]
        assert max(sizes) - min(sizes) <= ALIGNMENT_BYTES


def test_a_large_head_comes_early_where_no_memory_is_left_for_larger_segments() -> None:
    built = build(PROBLEM)
    parts = built.chain, built.costs, built.times
    least = least_budget_bytes(*parts, built.machine, REQUEST)
    machine = dataclasses.replace(built.machine, device_memory_bytes=least)
    late = make_plan(*parts, machine, dataclasses.replace(REQUEST, early=False))
    early = make_plan(*parts, machine, REQUEST)
    assert late.early_blocks == ()
    assert early.early_blocks == (4,)
    assert early.device_peak_bytes == late.device_peak_bytes == least
    # The first load takes two seconds more, and the head's nine fewer, of which four were hidden.
    assert late.step_s - early.step_s == pytest.approx(4.5, rel=0.01)
    assert "early      blocks 4" in early.describe()
    # Their updates would be the last to be done, and forward begins with the pieces.
    assert make_plan(*parts, machine, dataclasses.replace(REQUEST, clips=True)).early_blocks == ()


def test_what_is_no_larger_than_most_layers_never_comes_early() -> None:
    built = build(PROBLEM._replace(layers=(0, 0, 0, 0, 0)))
    spaces = [built.space(dataclasses.replace(REQUEST, resident=None, device_blocks=None))]
    spaces.append(built.space(REQUEST))
    assert not [one for space in spaces for one in space.residencies if one.early]
