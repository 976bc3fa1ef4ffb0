"""The vertical schedule: right content, least loads, and loads that can be hidden."""

from __future__ import annotations

import functools
import itertools

import pytest

from atomtrain.errors import PlanError
from atomtrain.planning.plan.kept import check_shape
from atomtrain.planning.plan.shape import (
    Layers,
    Phase,
    Shape,
    Visit,
    evaluation_visits,
    training_visits,
)

SIZES = [(s, k) for s in range(1, 13) for k in range(1, 4)]


def uniform(segments: int, slots: int, buffers: int = 2) -> Shape:
    return Shape(tuple(range(segments)), tuple(range(segments + 1)), slots, buffers)


def both(segments: int, slots: int) -> list[tuple[Visit, ...]]:
    shape = uniform(segments, slots)
    return [training_visits(shape), evaluation_visits(shape)]


def firsts(visits: tuple[Visit, ...]) -> list[int]:
    return [visit.layers[0] for visit in visits]


@pytest.mark.parametrize(("segments", "slots"), SIZES)
def test_every_visit_finds_its_segment_in_its_slot(segments: int, slots: int) -> None:
    for visits in both(segments, slots):
        content: dict[int, Layers] = {}
        last_use = dict.fromkeys(range(slots), -1)
        for index, visit in enumerate(visits):
            assert 0 <= visit.slot < slots
            assert visit.free_after == last_use[visit.slot]
            assert visit.free_after < index
            if visit.load:
                assert visit.layers not in content.values(), "a hit is never loaded again"
                content[visit.slot] = visit.layers
            assert content[visit.slot] == visit.layers
            last_use[visit.slot] = index


@pytest.mark.parametrize(("segments", "slots"), SIZES)
def test_the_order_is_up_turn_down(segments: int, slots: int) -> None:
    visits = training_visits(uniform(segments, slots))
    up, turn, down = visits[: segments - 1], visits[segments - 1], visits[segments:]
    assert firsts(up) == list(range(segments - 1))
    assert {v.phase for v in up} <= {Phase.FORWARD}
    assert (turn.phase, turn.layers) == (Phase.TURN, (segments - 1, segments))
    assert firsts(down) == list(reversed(range(segments - 1)))
    assert {v.phase for v in down} <= {Phase.BACKWARD}
    evaluation = evaluation_visits(uniform(segments, slots))
    assert firsts(evaluation) == list(range(segments))
    assert {v.phase for v in evaluation} == {Phase.EVALUATE}
    assert all(v.load and v.gradient is None for v in evaluation)


@pytest.mark.parametrize(("segments", "slots"), [(s, k) for s, k in SIZES if k >= 2])
def test_a_load_never_targets_the_slot_that_computes_before_it(segments: int, slots: int) -> None:
    for visits in both(segments, slots):
        for before, visit in itertools.pairwise(visits):
            assert not visit.load or visit.slot != before.slot


@pytest.mark.parametrize(("segments", "slots"), [(s, k) for s, k in SIZES if s > 1])
def test_around_the_turn_what_the_slots_hold_is_not_loaded_again(segments: int, slots: int) -> None:
    visits = training_visits(uniform(segments, slots, 1))
    held = slots - 1  # besides the turn's own segment
    after = visits[segments : segments + held]
    assert not any(visit.load for visit in after)
    assert sum(v.load for v in visits) == segments + max(0, segments - 1 - held)


def test_partitions_may_differ_and_equal_ranges_are_not_loaded_twice() -> None:
    visits = training_visits(Shape((0, 1, 3, 4), (0, 2, 3, 4, 6), 2, 1))
    loads = [(v.phase, v.layers) for v in visits if v.load]
    assert [v.layers for v in visits] == [(0, 1), (1, 3), (3, 4), (4, 6), (3, 4), (2, 3), (0, 2)]
    assert (Phase.BACKWARD, (3, 4)) not in loads, "its slot still holds it"
    assert len(loads) == 6


def test_graphs_that_wait_are_marked_on_their_way_up_and_down() -> None:
    activations = ("offload", "recompute", "keep", "recompute")
    visits = training_visits(Shape((0, 1, 2, 4), (0, 1, 2, 4, 5), 2, 1, activations=activations))
    assert [v.leaves for v in visits] == [True, False, True, False, False, False, False]
    assert [v.finds for v in visits] == [False, False, False, False, True, False, True]
    assert [v.home for v in visits if v.finds] == [visits[2].slot, visits[0].slot]
    assert all(v.home == v.slot for v in visits if not v.finds)
    evaluation = evaluation_visits(Shape((0, 4), (0, 4, 5), 2, 1, activations=activations[2:]))
    assert not any(v.leaves or v.finds for v in evaluation)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (Shape((0, 2), (0, 2, 3), 2, 1), "backward_bounds"),
        (Shape((0, 1), (0, 2, 4), 2, 1), "forward_bounds"),
        (Shape((0, 2), (0, 2, 4), 0, 1), "one slot"),
        (Shape((0, 2), (0, 2, 4), 2, 1, resident_blocks=(5,)), "resident_blocks"),
        (Shape((0, 2), (0, 2, 4), 2, 1, host_layers=4), "host_layers"),
        (Shape((0, 2), (0, 2, 4), 2, 1, host_layers=1), "must rise from 1"),
        (Shape((0, 2), (0, 2, 4), 2, 1, activations=("keep",)), "2 segments"),
        (Shape((0, 1, 2), (0, 2, 4), 2, 1, activations=("keep", "recompute")), "cannot keep"),
        (Shape((0, 1, 2), (0, 2, 4), 2, 1, activations=("offload", "recompute")), "cannot offload"),
        (Shape((0, 2), (0, 2, 4), 2, 1, activations=("recompute", "keep")), "cannot keep"),
    ],
)
def test_impossible_shapes_are_refused(shape: Shape, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_shape(shape, 4, 5)


@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_gradient_buffers_are_used_in_turn(buffers: int) -> None:
    visits = training_visits(uniform(5, 2, buffers))
    given = [v.gradient for v in visits if v.phase is not Phase.FORWARD]
    assert given == [index % buffers for index in range(5)]
    assert all(v.gradient is None for v in visits if v.phase is Phase.FORWARD)


@pytest.mark.parametrize(("segments", "slots"), [(s, k) for s, k in SIZES if s <= 7])
def test_no_choice_of_slots_needs_fewer_loads(segments: int, slots: int) -> None:
    for visits in both(segments, slots):
        order = tuple(firsts(visits))
        assert sum(visit.load for visit in visits) == _fewest_loads(order, slots)


def _fewest_loads(order: tuple[int, ...], slots: int) -> int:
    """Try every slot for every load, but not the slot of the visit before (if there are two)."""

    @functools.cache
    def fewest(index: int, content: tuple[int | None, ...], busy: int | None) -> int:
        if index == len(order):
            return 0
        if order[index] in content:
            return fewest(index + 1, content, content.index(order[index]))
        costs = []
        for slot in range(slots):
            if slots > 1 and slot == busy:
                continue
            after = (*content[:slot], order[index], *content[slot + 1 :])
            costs.append(1 + fewest(index + 1, after, slot))
        return min(costs)

    return fewest(0, (None,) * slots, None)
