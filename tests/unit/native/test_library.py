"""The compiled core is built, found and refused as it should be."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from atomtrain.native import build, library


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compiled")
    build.build(folder, ["-O0"])  # in a tenth of the time; no kernel runs here
    return folder


@pytest.fixture
def built(compiled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(compiled, tmp_path / "built"))


@pytest.mark.slow
def test_every_level_is_built_and_this_processors_is_loaded(built: Path) -> None:
    assert {path.name for path in built.iterdir()} == {
        build.library_path(level).name for level in build.levels()
    }
    found, reason = library.load(built)
    assert found is not None
    assert not reason


def test_sources_are_run_by_the_processor_for_which_they_are_built(tmp_path: Path) -> None:
    assert library.level() in build.own_levels()
    assert build.own_levels(tmp_path / "missing") == build.levels()
    (tmp_path / "cpuinfo").write_text("flags\t\t: fpu sse2 avx2\n")
    wanted = ["DEFAULT"] if len(build.levels()) > 1 else build.levels()
    assert build.own_levels(tmp_path / "cpuinfo") == wanted


def test_the_installed_core_is_of_these_sources() -> None:
    assert library.core() is not None, "run `python -m atomtrain.native.build`"


def test_without_a_library_the_reason_says_what_to_do(tmp_path: Path) -> None:
    found, reason = library.load(tmp_path)
    assert found is None
    assert "python -m atomtrain.native.build" in reason


def test_a_damaged_library_is_not_used(built: Path) -> None:
    for path in built.iterdir():
        path.write_bytes(b"no library")
    found, reason = library.load(built)
    assert found is None
    assert "cannot be loaded" in reason


def test_a_library_of_other_sources_is_not_used(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "fingerprint", lambda: "another")
    found, reason = library.load(built)
    assert found is None
    assert "not of these sources" in reason


def test_without_a_compiler_building_says_so(tmp_path: Path) -> None:
    """The file alone: what builds the package has nothing else of it yet."""
    done = subprocess.run(
        [sys.executable, "-I", build.__file__],
        env={**os.environ, "PATH": str(tmp_path), "CC": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "no C compiler was found" in done.stderr


def test_what_the_compiler_says_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-include", "there-is-no-such-file.h"))
    with pytest.raises(build.BuildError, match=r"there-is-no-such-file\.h"):
        build.build(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 127, 128, 1000, (1 << 20) + 1])
def test_ranges_are_whole_and_begin_at_multiples(count: int, parts: int) -> None:
    ranges = library.divided(count, 128, parts)
    assert len(ranges) <= parts
    assert [i for some in ranges for i in some][1:-1] == [
        i for _, end in ranges[:-1] for i in (end, end)
    ]
    assert (ranges[0][0], ranges[-1][1]) == (0, count) if count else not ranges
    assert all(begin % 128 == 0 and end > begin for begin, end in ranges)
    assert len(ranges) == max(1, min(parts, count // library.LEAST_ELEMENTS)) or not count


@pytest.mark.parametrize(
    ("cores", "torchs", "expected"),
    [(1, 8, 1), (2, 8, 2), (3, 8, 2), (8, 8, 7), (9, 9, 7), (16, 64, 14), (16, 4, 4)],
)
def test_cores_are_left_where_there_are_more_than_two(
    monkeypatch: pytest.MonkeyPatch, cores: int, torchs: int, expected: int
) -> None:
    monkeypatch.setattr(library, "physical_cores", lambda _: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: torchs)
    assert library.threads() == expected


def test_ranges_run_at_once_and_errors_come_when_all_are_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(library, "threads", lambda: 3)
    monkeypatch.setattr(library, "LEAST_ELEMENTS", 1)
    together = threading.Barrier(3)
    over = itertools.count()

    def job(begin: int, end: int) -> None:
        together.wait(60)  # all three are here, or this raises
        next(over)
        if begin:
            raise ValueError(f"{begin} to {end}")

    with pytest.raises(ValueError, match="128 to 256"):
        library.run(job, 384, 128)
    assert next(over) == 3
