"""Predicted steps against ones worked out by hand."""

from __future__ import annotations

import pytest

from atomtrain.planning.cost.timeline import StepTime, VisitTime, step_spans, step_time
from atomtrain.planning.plan.shape import Phase, Shape, training_visits


def uniform(segments: int, slots: int, buffers: int) -> Shape:
    return Shape(tuple(range(segments)), tuple(range(segments + 1)), slots, buffers)


def step(
    shape: Shape, forward_s: float = 0.0, backward_s: float = 0.0, **seconds: float
) -> StepTime:
    visits = training_visits(shape)
    times = [
        VisitTime(forward_s if v.phase is Phase.FORWARD else backward_s, **seconds) for v in visits
    ]
    return step_time(step_spans(visits, times))


@pytest.mark.parametrize("segments", [1, 2, 5])
def test_compute_alone_is_the_sum_of_all_visits(segments: int) -> None:
    made = step(uniform(segments, 2, 2), forward_s=1, backward_s=3)
    assert made.step_s == pytest.approx((segments - 1) * 1 + segments * 3)
    assert made.compute_s == pytest.approx(made.step_s)
    assert made.bound == "compute"


def test_loads_hide_behind_compute_with_two_slots_and_not_with_one() -> None:
    two = step(uniform(4, 2, 1), forward_s=1.0, backward_s=3.0, load_s=0.9)
    one = step(uniform(4, 1, 1), forward_s=1.0, backward_s=3.0, load_s=0.9)
    assert two.step_s == pytest.approx(15.0 + 0.9), "only the first load cannot hide"
    assert one.step_s == pytest.approx(15.0 + 7 * 0.9)


def test_a_slow_link_bounds_the_step() -> None:
    made = step(uniform(4, 2, 1), forward_s=0.1, backward_s=0.3, load_s=10.0)
    assert made.bound == "link (host to device)"
    assert made.load_s == 60.0, "four segments up, two of them again down"
    assert made.step_s >= 60.0


def test_updates_hide_behind_the_rest_of_backward() -> None:
    made = step(uniform(3, 2, 2), forward_s=1, backward_s=3, update_s=0.5)
    # Only the first segment's update, the last to be done, cannot hide.
    assert made.step_s == pytest.approx(11.5)


def test_gradients_hide_behind_compute_with_two_buffers_and_not_with_one() -> None:
    two = step(uniform(3, 2, 2), forward_s=1, backward_s=3, unload_s=2)
    one = step(uniform(3, 2, 1), forward_s=1, backward_s=3, unload_s=2)
    assert two.step_s == pytest.approx(2 * 1 + 3 * 3 + 2), "only the last one cannot hide"
    assert one.step_s == pytest.approx(2 * 1 + 3 * (3 + 2))


def test_values_that_move_longer_than_they_are_computed_with_make_a_visit_longer() -> None:
    made = step(uniform(2, 2, 1), forward_s=1, backward_s=1, save_s=4, fetch_s=2)
    assert made.step_s == pytest.approx(12)
    assert made.compute_s == pytest.approx(3)


def test_spans_are_labelled_and_do_not_overlap_on_their_stream() -> None:
    shape = Shape((0, 2, 3), (0, 1, 3, 5), 2, 2)
    visits = training_visits(shape)
    spans = step_spans(visits, [VisitTime(2, 1, 3, 1, 0.5, 0.5) for _ in visits])
    labels = [span.label for span in spans if span.stream == "compute"]
    assert labels == ["forward 0-1", "forward 2", "turn 3-4", "backward 1-2", "backward 0"]
    for stream in {span.stream for span in spans}:
        ends = 0.0
        for span in (s for s in spans if s.stream == stream):
            assert span.start_s >= ends
            ends = span.end_s
