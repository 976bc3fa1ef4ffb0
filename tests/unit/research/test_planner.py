"""The plainer search looks in the planner's space, and finds nothing that the planner misses."""

from __future__ import annotations

import pytest

from atomresearch.planner.__main__ import chains, compared, summary
from atomresearch.planner.coordinates import CoordinateSearch


@pytest.mark.slow
def test_coordinates_find_plans_of_the_space_none_faster_than_the_planners() -> None:
    for case in chains(3):
        row = compared(case)
        assert row is not None
        assert row.ratio >= 1 - 1e-9
        found = CoordinateSearch(case.space, case.device_bytes).best()
        assert found is not None
        assert case.space.has(found.shape)
        assert case.space.memory.device_bytes(found.shape) == found.device_bytes
        assert found.device_bytes <= case.device_bytes


def test_nothing_is_found_where_nothing_fits() -> None:
    [case] = chains(1)
    assert CoordinateSearch(case.space, 1).best() is None
    assert compared(case._replace(device_bytes=1)) is None


@pytest.mark.slow
def test_what_is_said_is_of_all_cases() -> None:
    said = summary(chains(3))
    assert said["cases"] == 3
    assert 0 <= said["within_1_percent"] <= 1
    assert said["worst"][0]["ratio"] == said["worst_ratio"]
    assert min(said["planner_s"], said["coordinates_s"]) > 0
