"""Updates are cut into ranges without a gap, for as many threads as there are cores to spare."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch

from atomtrain.native import pool


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 127, 128, 1000, (1 << 20) + 1])
def test_ranges_are_whole_and_begin_at_multiples(count: int, parts: int) -> None:
    ranges = pool.divided(count, 128, parts)
    assert len(ranges) <= parts
    assert [i for some in ranges for i in some][1:-1] == [
        i for _, end in ranges[:-1] for i in (end, end)
    ]
    assert (ranges[0][0], ranges[-1][1]) == (0, count) if count else not ranges
    assert all(begin % 128 == 0 and end > begin for begin, end in ranges)
    assert len(ranges) == max(1, min(parts, count // pool.LEAST_ELEMENTS)) or not count


@pytest.mark.parametrize(
    ("cores", "torchs", "expected"),
    [(1, 8, 1), (2, 8, 2), (3, 8, 2), (8, 8, 7), (9, 9, 7), (16, 64, 14), (16, 4, 4)],
)
def test_cores_are_left_where_there_are_more_than_two(
    monkeypatch: pytest.MonkeyPatch, cores: int, torchs: int, expected: int
) -> None:
    monkeypatch.setattr(pool, "physical_cores", lambda _: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: torchs)
    assert pool.threads() == expected


def test_ranges_run_at_once_and_errors_come_when_all_are_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "threads", lambda: 3)
    monkeypatch.setattr(pool, "LEAST_ELEMENTS", 1)
    together = threading.Barrier(3)
    over = itertools.count()

    def job(begin: int, end: int) -> None:
        together.wait(60)  # all three are here, or this raises
        next(over)
        if begin:
            raise ValueError(f"{begin} to {end}")

    with pytest.raises(ValueError, match="128 to 256"):
        pool.run(job, 384, 128)
    assert next(over) == 3
