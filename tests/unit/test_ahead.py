"""What comes for the next step while this one ends: which segment to which slot, and when."""

from __future__ import annotations

import pytest

from atomtrain.errors import StreamError
from atomtrain.planning import Shape
from atomtrain.planning.schedule import Visit, evaluation_visits, training_visits
from atomtrain.swapping.ahead import Ahead
from atomtrain.swapping.streams import Event, finished

LAYERS = 6
EACH = tuple(range(LAYERS + 1))


def shape_of(slots: int) -> Shape:
    return Shape(EACH[:-1], EACH, slots, 2)


def always(_: Visit) -> bool:
    return True


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_the_first_segments_get_the_slots_that_fall_free_in_reverse_order(slots: int) -> None:
    visits = training_visits(shape_of(slots))
    ahead = Ahead(slots)
    assert ahead.begin(visits) == {}
    came = []
    for done in range(len(visits)):
        found = ahead.may_come(done, always)
        # The slot of a visit that no later one has.
        alone = visits[done].slot not in {visit.slot for visit in visits[done + 1 :]}
        assert len(found) == alone
        for coming in found:
            assert coming.slot == visits[done].slot
            ahead.note(coming, finished())
            came.append(visits[coming.visit].layers)
    assert came == [(layer, layer + 1) for layer in reversed(range(slots))]
    assert set(ahead.begin(visits)) == set(range(slots))
    # Every segment is where it came to, and no two are in one place.
    assert [ahead.slot(visits[i].slot) for i in range(slots)] == [
        visit.slot for visit in reversed(visits[-slots:])
    ]


def test_what_is_not_updated_yet_comes_later_or_not_at_all() -> None:
    visits = training_visits(shape_of(3))
    ahead = Ahead(3)
    ahead.begin(visits)
    last = len(visits) - 1
    assert ahead.may_come(last - 1, lambda visit: visit.layers != (2, 3))[0].visit == 1
    found = ahead.may_come(last, lambda visit: visit.layers == (2, 3))
    assert [visits[coming.visit].layers for coming in found] == [(2, 3)]
    assert ahead.may_come(last, lambda _: False) == []
    assert ahead.begin(visits) == {}, "nothing was submitted"
    assert [ahead.slot(number) for number in range(3)] == [0, 1, 2]


def test_what_came_is_forgotten_when_asked_and_before_another_pass() -> None:
    visits, other = training_visits(shape_of(2)), evaluation_visits(shape_of(2))
    for forget in (True, False):
        ahead = Ahead(2)
        ahead.begin(visits)
        done: list[int] = []
        event = Event()
        job = ahead.while_wanted(lambda: done.append(1))  # noqa: B023  run in this round
        job()
        for coming in ahead.may_come(len(visits), always):
            ahead.note(coming, event)
        event.finish()
        if forget:
            ahead.forget()
        else:
            assert ahead.begin(other) == {}
            assert ahead.may_come(len(other), always) == [], "nothing follows an evaluation"
        job()
        assert done == [1], "a copy that nobody wants any more is not made"
        assert ahead.begin(visits) == {}
        ahead.while_wanted(lambda: done.append(2))()  # noqa: B023
        assert done == [1, 2]


def test_a_failed_load_shows_when_it_is_waited_for() -> None:
    for wait in (Ahead.forget, Ahead.wait):
        ahead = Ahead(1)
        visits = training_visits(shape_of(1))
        ahead.begin(visits)
        event = Event()
        event.finish(RuntimeError("boom"))
        (coming,) = ahead.may_come(len(visits), always)
        ahead.note(coming, event)
        with pytest.raises(StreamError, match="boom"):
            wait(ahead)
