"""Files that are replaced: whole or as they were, with nothing left beside them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atomtrain.errors import ConfigError
from atomtrain.files import read_small, replacing, replacing_named


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text("before")
    with replacing(path) as one, replacing(path) as other:
        assert one != other, "two writers do not disturb each other"
        one.write_text("first")
        other.write_text("second")
        assert path.read_text() == "before"
    assert path.read_text() == "first", "the last rename wins"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_fails_leaves_the_file_as_it_was(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "file.json"
    path.write_text("before")

    def write_half() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(type(error)):
        write_half()
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_command_cannot_write_is_told_as_a_mistake(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for path in (tmp_path / "missing" / "file", folder, tmp_path / ("x" * 250)):
        told = pytest.raises(ConfigError, match="choose a file in a folder")
        with told, replacing_named(path) as temporary:
            temporary.write_text("text")
    assert list(tmp_path.iterdir()) == [folder]


def test_a_small_file_of_a_stranger_is_read_or_refused(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    blobs.mkdir()
    folder.mkdir(parents=True)
    (blobs / "a").write_text("ü")
    (folder / "a").symlink_to("../../blobs/a")
    assert read_small(folder / "a") == "ü"
    (tmp_path / "secret").write_text("x")
    (folder / "b").symlink_to("../../secret")
    with pytest.raises(ValueError, match="outside of its folder"):
        read_small(folder / "b")
    (folder / "c").write_text("x" * 100)
    assert read_small(folder / "c", 100)
    with pytest.raises(ValueError, match="larger than"):
        read_small(folder / "c", 99)
    os.mkfifo(folder / "d")
    for name in ("d", "nowhere"):
        with pytest.raises(FileNotFoundError):
            read_small(folder / name)
