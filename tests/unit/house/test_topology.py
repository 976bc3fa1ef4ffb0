"""Cores, caches and nodes are read from folders made as the kernel makes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from atomtrain.topology import (
    ASSUMED_CACHE_BYTES,
    allowed_cores,
    cache_bytes,
    memory_nodes,
    numbers_of,
    physical_cores,
)

MIB = 1 << 20


def host(folder: Path, *, cores: int, threads: int, sharing: int, last: str = "32768K") -> Path:
    """Make a host's folder: cores `n` and `n + cores` are one, `sharing` of them share a cache."""
    logical = cores * threads
    for number in range(logical):
        here = folder / f"cpu/cpu{number}"
        siblings = sorted({number % cores + turn * cores for turn in range(threads)})
        group = number % cores // sharing
        shared = [n for n in range(logical) if n % cores // sharing == group]
        files = {"topology/thread_siblings_list": _listed(siblings)}
        for index, (level, kind, who, size) in enumerate(
            [
                (1, "Data", siblings, "32K"),
                (1, "Instruction", siblings, "64M"),
                (2, "Unified", siblings, "1M"),
                (3, "Unified", shared, last),
            ]
        ):
            named = ("level", level), ("type", kind), ("size", size), ("shared_cpu_list", who)
            for name, value in named:
                text = _listed(value) if isinstance(value, list) else value
                files[f"cache/index{index}/{name}"] = str(text)
        for name, text in files.items():
            path = here / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
    return folder


def _listed(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))


def test_threads_of_a_core_are_one_physical_core(tmp_path: Path) -> None:
    system = host(tmp_path, cores=8, threads=2, sharing=4)
    assert physical_cores(frozenset(range(16)), system) == 8
    assert physical_cores(frozenset(range(8)), system) == 8
    assert physical_cores(frozenset({0, 8, 1}), system) == 2  # what `taskset` left
    assert physical_cores(frozenset({0, 99}), system) == 2  # nothing tells of 99
    assert physical_cores(frozenset(range(5)), tmp_path / "nothing") == 5


def test_each_chip_s_last_cache_counts_once(tmp_path: Path) -> None:
    system = host(tmp_path, cores=8, threads=2, sharing=4)
    assert cache_bytes(frozenset(range(16)), system) == 2 * 32 * MIB
    assert cache_bytes(frozenset({0, 1, 8}), system) == 32 * MIB
    assert cache_bytes(frozenset({3, 4}), system) == 2 * 32 * MIB
    assert cache_bytes(frozenset({0}), tmp_path / "nothing") == ASSUMED_CACHE_BYTES


def test_a_cache_that_makes_no_sense_is_passed_over(tmp_path: Path) -> None:
    system = host(tmp_path, cores=1, threads=1, sharing=1, last="much")
    assert cache_bytes(frozenset({0}), system) == MIB


@pytest.mark.parametrize(
    ("has_memory", "allowed", "expected"),
    [("0", "0", [0]), ("0-1", "0-1", [0, 1]), ("0-3,8", "1,8", [1, 8]), ("0-1", "0", [0])],
)
def test_nodes_are_those_with_memory_that_the_process_may_use(
    tmp_path: Path, has_memory: str, allowed: str, expected: list[int]
) -> None:
    (tmp_path / "node").mkdir()
    (tmp_path / "node/has_memory").write_text(f"{has_memory}\n")
    status = tmp_path / "status"
    status.write_text(f"Name:\tatom\nMems_allowed_list:\t{allowed}\n")
    assert memory_nodes(tmp_path, status) == expected
    assert memory_nodes(tmp_path, tmp_path / "nothing")[0] == 0
    assert memory_nodes(tmp_path / "nothing", status) == [0]


def test_lists_of_the_kernel_are_read() -> None:
    assert numbers_of("0-2,5\n") == {0, 1, 2, 5}
    assert numbers_of("\n") == set()
    with pytest.raises(ValueError, match="x"):
        numbers_of("x")


def test_this_host_tells_something() -> None:
    cores = allowed_cores()
    assert 1 <= physical_cores(cores) <= len(cores)
    assert cache_bytes(cores) > 0
    assert memory_nodes()
