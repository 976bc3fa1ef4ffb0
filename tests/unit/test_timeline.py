"""Predicted steps against ones worked out by hand."""

from __future__ import annotations

import pytest

from atomtrain.planning.schedule import training_visits
from atomtrain.planning.timeline import SegmentTime, predict


def times(count: int, **seconds: float) -> list[SegmentTime]:
    zero = dict.fromkeys(SegmentTime._fields, 0.0)
    return [SegmentTime(**{**zero, **seconds})] * count


@pytest.mark.parametrize("segments", [1, 2, 5])
def test_compute_alone_is_the_sum_of_all_visits(segments: int) -> None:
    step = predict(training_visits(segments, 2, 2), times(segments, forward_s=1, backward_s=3))
    assert step.step_s == pytest.approx((segments - 1) * 1 + segments * 3)
    assert step.compute_s == pytest.approx(step.step_s)
    assert step.bound == "compute"


def test_loads_hide_behind_compute_with_two_slots_and_not_with_one() -> None:
    seconds = {"forward_s": 1.0, "backward_s": 3.0, "load_s": 0.9}
    two = predict(training_visits(4, 2, 1), times(4, **seconds))
    one = predict(training_visits(4, 1, 1), times(4, **seconds))
    assert two.step_s == pytest.approx(15.0 + 0.9), "only the first load cannot hide"
    assert one.step_s == pytest.approx(15.0 + 7 * 0.9)


def test_a_slow_link_bounds_the_step() -> None:
    step = predict(training_visits(4, 2, 1), times(4, forward_s=0.1, backward_s=0.3, load_s=10.0))
    assert step.bound == "link (host to device)"
    assert step.load_s == 60.0, "four segments up, two of them again down"
    assert step.step_s >= 60.0


def test_the_update_overlaps_the_next_step() -> None:
    step = predict(training_visits(3, 2, 2), times(3, forward_s=1, backward_s=3, update_s=0.5))
    # Only the first segment's update, the last to be done, cannot hide.
    assert step.step_s == pytest.approx(11.5)
