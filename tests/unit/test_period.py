"""Steps in a row: what the next one gains by what comes while this one ends."""

from __future__ import annotations

import pytest

from atomtrain.planning.host import HostTime
from atomtrain.planning.period import Coming, period_s
from atomtrain.planning.schedule import Phase, Visit, hand_overs, training_visits
from atomtrain.planning.shape import Shape, finest
from atomtrain.planning.timeline import VisitTime, predict

NOBODY = HostTime()


def visits_of(layers: int, slots: int) -> tuple[Visit, ...]:
    return training_visits(Shape(finest(layers - 1), finest(layers), slots, 2))


def times_of(visits: tuple[Visit, ...], **seconds: float) -> list[VisitTime]:
    return [VisitTime(1.0 if v.phase is Phase.FORWARD else 3.0, **seconds) for v in visits]


def coming_of(visits: tuple[Visit, ...], parts: int = 1) -> list[Coming]:
    """Return what comes where every layer is a segment."""
    last = len(visits) - 1
    overs = hand_overs(visits)
    return [Coming(o, last - visits[o.visit].layers[0], parts * (1 / parts,)) for o in overs]


@pytest.mark.parametrize("slots", [1, 2])
def test_only_the_last_part_of_the_first_segment_is_waited_for(slots: int) -> None:
    visits = visits_of(4, slots)
    times = times_of(visits, load_s=2.0, unload_s=2.0)
    alone = predict(visits, times).step_s
    for parts in (1, 4):
        row = period_s(visits, times, coming_of(visits, parts), NOBODY)
        # The other 2 - 2 / parts s come while its last gradients leave. With two slots the second
        # segment is there then, for which the first one's compute would be too short by 1 s.
        assert row == pytest.approx(alone - (2 - 2 / parts) - (slots - 1) * 1.0)


def test_what_waits_for_compute_alone_gains_only_the_first_load() -> None:
    visits = visits_of(4, 2)
    times = times_of(visits, load_s=0.5, unload_s=0.5, update_s=0.25)
    alone = predict(visits, times).step_s
    assert alone == pytest.approx(0.5 + 3 * 1 + 4 * 3 + 0.75)
    assert period_s(visits, times, coming_of(visits), NOBODY) == pytest.approx(alone)
    in_parts = period_s(visits, times, coming_of(visits, 2), NOBODY)
    assert in_parts == pytest.approx(alone - 0.25 - 0.125), "half a load, half an update"


def test_the_first_visit_waits_for_layers_on_the_host() -> None:
    visits = visits_of(4, 2)
    times = times_of(visits, load_s=0.5, unload_s=0.5)
    aside = HostTime(forward_s=1.0, backward_s=4.0)
    row = period_s(visits, times, coming_of(visits), aside)
    # Their backward comes after the last update, beside the first load.
    assert row == pytest.approx(3 * 1 + 4 * 3 + 0.5 + 5.0)


def test_no_row_of_steps_is_faster_than_the_way_of_the_layer_that_is_updated_last() -> None:
    visits = visits_of(4, 2)
    times = times_of(visits, load_s=0.5, unload_s=0.5, update_s=10.0)
    row = period_s(visits, times, coming_of(visits), NOBODY)
    # It comes, all go forward, the turn's gradients leave, and all are updated.
    assert row == pytest.approx(0.5 + 3 * 1 + 3 + 0.5 + 4 * 10.0)
