"""Steps one after the other, as tests lay them out."""

from __future__ import annotations

import random

import pytest

from atomtrain.planning.cost.timeline import VisitTime, step_spans, step_time
from atomtrain.planning.plan.shape import Shape, training_visits
from tests.support.planning_models import random_shape
from tests.support.steady_steps import steady_step_s

WHOLE = training_visits(Shape((0,), (0, 3), 1, 1, "device"))
TIME = VisitTime(compute_s=10.0, load_s=1.0, unload_s=1.0, update_s=5.0)


@pytest.mark.parametrize("clips", [False, True])
def test_one_segment_waits_for_everything(clips: bool) -> None:
    assert steady_step_s(WHOLE, [TIME], clips=clips) == pytest.approx(17)


def test_updates_of_many_segments_overlap_the_steps_unless_they_are_slow() -> None:
    """Compute covers all but the first segment's own unload, update and load."""
    shape = Shape(tuple(range(9)), tuple(range(10)), 2, 2, "device")
    visits = training_visits(shape)
    times = [VisitTime(10.0, 1.0, 1.0, 2.0) for _ in visits]
    exact = steady_step_s(visits, times, clips=False)
    assert exact == pytest.approx(len(visits) * 10 + 1 + 1 + 2)
    clipped = steady_step_s(visits, times, clips=True)
    assert clipped == pytest.approx(exact), "forward is slower than the updates it waits for"


@pytest.mark.parametrize("seed", range(20))
def test_without_clipping_a_step_alone_takes_what_it_takes_in_a_row(seed: int) -> None:
    """Any shape, any link: the next step's first load waits for this step's last updates.

    Where it needs only the first of these the prediction is too long, by the others.
    """
    source = random.Random(seed)
    visits = training_visits(random_shape(source, 6, 6))
    times = [VisitTime(*(source.uniform(0.1, 4.0) for _ in range(4))) for _ in visits]
    row_s = steady_step_s(visits, times, clips=False)
    alone_s = step_time(step_spans(visits, times)).step_s
    (_, first), (_, last) = visits[0].layers, visits[-1].layers
    others_s = max(0.0, 1 - first / last) * times[-1].update_s
    assert alone_s - others_s <= row_s + 1e-9
    assert row_s <= alone_s + 1e-9
