"""Which of several ways to a cut the search goes on with, and how visits move its clocks."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from atomtrain.planning.cost.timeline import DiskWork
from atomtrain.planning.search.dp_state import (
    BEFORE,
    CLOCKS,
    COMPUTE,
    FIRST,
    LOAD,
    UNLOAD,
    UPDATE,
    Clocks,
    Lasting,
    undominated,
)
from atomtrain.planning.search.space import Family

ROUNDING, MORE = 1e-15, 1e-9


def family(slots: int, buffers: int) -> Family:
    return Family((), slots, buffers, "device", False)


def kept(*rows: tuple[float, ...]) -> set[int]:
    return set(undominated(np.array(rows)))


@pytest.mark.parametrize("sign", [1, -1])
def test_sums_in_another_order_are_no_difference(sign: int) -> None:
    """Rounding makes each better than the other in something; else all ways would be kept."""
    some = (1.0, sign * 2.0)
    assert len(kept(some, (1 + ROUNDING, sign * (2 - 2 * ROUNDING)))) == 1
    assert kept(some, (1 + MORE, sign * (2 - sign * MORE))) == {0, 1}


def test_only_what_nothing_beats_is_kept() -> None:
    assert kept((1.0, 2.0), (2.0, 1.0), (2.0, 2.0), (1.0, 2.0), (3.0, 0.0)) in (
        {0, 1, 4}, {3, 1, 4},
    )  # fmt: skip
    assert kept((0.0, -1.0), (0.0, -2.0)) == {1}
    assert kept((5.0, 5.0), (5.0, 5.0)) == {0}
    assert kept((5.0,)) == {0}


def test_times_without_end_are_compared_as_others_are() -> None:
    never = float("inf")
    assert kept((never, 1.0), (never, 2.0), (1.0, 3.0)) == {0, 2}


def random_rows(seed: int) -> NDArray[np.float64]:
    return np.random.default_rng(seed).integers(-3, 4, (40, 3)).astype(float)


@pytest.mark.parametrize("seed", range(5))
def test_every_way_that_is_left_out_is_beaten_by_one_that_is_kept(seed: int) -> None:
    rows = random_rows(seed)
    found = undominated(rows)
    for index, row in enumerate(rows):
        others = [rows[i] for i in found if i != index]
        beaten = any(bool((other <= row).all()) for other in others)
        assert beaten is (index not in found)


def clocks_of(given: dict[int, float]) -> NDArray[np.float64]:
    return np.array([[given.get(clock, 0.0) for clock in range(CLOCKS)]])


def visited(clocks: Clocks, before: NDArray[np.float64], **lasting: float) -> list[float]:
    seconds = {name: lasting.get(name, 0.0) for name in Lasting._fields}
    (after,) = clocks.after_visit(before, Lasting(**seconds))
    return [float(clock) for clock in after]


LASTING = {"visit_s": 10.0, "loading_s": 4.0, "unload_s": 3.0, "update_s": 2.0}


def test_with_two_slots_the_next_load_goes_on_beside_compute() -> None:
    clocks = Clocks(family(2, 2), None, 9.0)
    before = clocks_of({COMPUTE: 5.0, LOAD: 3.0, UNLOAD: 6.0, BEFORE: 1.0, UPDATE: 30.0})
    after = visited(clocks, before, **LASTING)
    # The load is there at 7, after compute was free at 5.
    assert (after[COMPUTE], after[LOAD]) == (17.0, 8.0)
    assert (after[UNLOAD], after[BEFORE], after[UPDATE]) == (20.0, 17.0, 32.0)
    later = visited(clocks, before, **LASTING, return_s=5.0)
    assert later[LOAD] == 12.0, "the link is busy with what comes back"


def test_with_one_slot_loads_follow_compute() -> None:
    clocks = Clocks(family(1, 2), None, 9.0)
    after = visited(clocks, clocks_of({COMPUTE: 5.0, LOAD: 5.0}), **LASTING)
    assert (after[COMPUTE], after[LOAD]) == (19.0, 19.0)


def test_a_gradient_buffer_is_free_once_it_was_unloaded() -> None:
    before = clocks_of({UNLOAD: 20.0, BEFORE: 15.0})
    for buffers, begin_s in ((1, 20.0), (2, 15.0)):
        clocks = Clocks(family(2, buffers), None, 9.0)
        assert visited(clocks, before, **LASTING)[COMPUTE] == begin_s + 10.0


def test_a_disk_works_from_the_first_gradients_on() -> None:
    disk = DiskWork(read_s=7.0, update_s=1.0, write_s=5.0, ahead_s=2.0, blocks=4, clips=False)
    clocks = Clocks(family(2, 2), disk)
    before = clocks_of({COMPUTE: 1.0, FIRST: 6.0, UPDATE: 3.0})
    assert visited(clocks, before, visit_s=1.0)[FIRST] == 6.0
    assert float(clocks.ends(before)[0]) == max(3.0 + disk.last_s, 6.0 + disk.working_s)
    below_s = 6.0 + disk.working_s
    assert clocks.hopeful(before, 0.0, below_s).all()
    assert not clocks.hopeful(before, 0.0, 0.99 * below_s).any()
    assert not clocks.hopeful(before, below_s, below_s).any(), "compute is left for longer"
