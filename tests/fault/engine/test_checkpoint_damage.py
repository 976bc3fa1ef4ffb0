"""Damage is found and named, and the checkpoint before is used; a full disk harms nothing."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from atombench import forks
from atomtrain import checkpoint
from atomtrain.checkpoint import writer
from atomtrain.errors import CheckpointError

FILES = ["manifest.json", "shard-00000.safetensors", "shard-00001.safetensors", "tokenizer.json"]


def save(folder: Path, step: int, numbers: int = 16) -> Path:
    shards = {name: {"w": torch.full((numbers,), float(step))} for name in ("a", "b")}
    return checkpoint.save(folder, step, shards, {"position": step}, {"tokenizer.json": "{} "})


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def flip_middle_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def remove(path: Path) -> None:
    path.unlink()


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = [truncate, empty, flip_middle_bit, remove, replace_by_folder]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [*DAMAGES, grow], ids=lambda damage: damage.__name__)
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_used(
    tmp_path: Path,
    name: str,
    damage: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    damage(newest / name)
    with caplog.at_level(logging.WARNING):
        loaded = checkpoint.load_latest(tmp_path)
    assert loaded.step == 1
    assert loaded.meta == {"position": 1}
    assert len(loaded.skipped) == 1
    assert str(newest / name) in loaded.skipped[0]
    assert str(newest / name) in caplog.text
    with pytest.raises(CheckpointError, match=name):
        checkpoint.open_checkpoint(newest)


def test_every_single_flipped_byte_of_a_checkpoint_is_found(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, {"a": {"w": torch.ones(2)}}, {"p": 1}, {"t.txt": "x"})
    for file in sorted(path.iterdir()):
        original = file.read_bytes()
        for index in range(len(original)):
            file.write_bytes(
                original[:index] + bytes([original[index] ^ 4]) + original[index + 1 :]
            )
            message = ""
            try:
                checkpoint.open_checkpoint(path)
            except CheckpointError as error:
                message = str(error)
            if not message:
                # White space between JSON tokens is all that may change unnoticed.
                assert file.name == "manifest.json"
                assert json.loads(file.read_bytes()) == json.loads(original), index
            else:
                assert file.name in message
        file.write_bytes(original)


def test_when_none_is_intact_every_damaged_file_is_named(tmp_path: Path) -> None:
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    truncate(first / "shard-00001.safetensors")
    remove(second / "manifest.json")
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load_latest(tmp_path)
    assert str(first / "shard-00001.safetensors") in str(caught.value)
    assert str(second / "manifest.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_another_format_version_is_refused_not_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    manifest = json.loads((newest / "manifest.json").read_text())
    manifest["version"] = 99
    (newest / "manifest.json").write_text(json.dumps(manifest))
    for load in (checkpoint.load_latest, checkpoint.open_checkpoint):
        with pytest.raises(CheckpointError, match=r"format 99.*reads format 1"):
            load(tmp_path)


@pytest.mark.parametrize("garbage", [b"", b"\x00\xff" * 50, b"[]", b"{}", b"[" * 100_000, b'"x"'])
def test_a_manifest_of_garbage_is_refused(tmp_path: Path, garbage: bytes) -> None:
    path = save(tmp_path, 1)
    (path / "manifest.json").write_bytes(garbage)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        checkpoint.open_checkpoint(path)


def test_a_manifest_cannot_reach_outside_its_directory(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    secret = tmp_path / "secret"
    secret.write_text("x")
    content = json.loads((path / "manifest.json").read_text())
    content["texts"][0]["file"] = "../secret"
    del content["manifest_sha256"]
    plain = json.dumps(content, sort_keys=True).encode()
    content["manifest_sha256"] = hashlib.sha256(plain).hexdigest()
    (path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"malformed.*secret"):
        checkpoint.open_checkpoint(path)


def test_a_shard_that_vanishes_after_opening_is_a_clear_error(tmp_path: Path) -> None:
    loaded = checkpoint.open_checkpoint(save(tmp_path, 1))
    remove(loaded.path / "shard-00001.safetensors")
    with pytest.raises(CheckpointError, match="shard-00001"):
        list(loaded.shards())


def test_training_goes_on_past_a_damaged_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)
    flip_middle_bit(save(tmp_path, 2) / "manifest.json")
    save(tmp_path, 3)
    assert checkpoint.load_latest(tmp_path).step == 3
    save(tmp_path, 4)
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000003", "step-00000004"]


def test_leftovers_of_dead_writers_are_removed_by_the_next_save(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for name in (".unfinished-step-00000002", ".unfinished-step-00000007", ".discarded-step-0000"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "shard-00000.safetensors").write_bytes(b"half")
    assert checkpoint.load_latest(tmp_path).step == 1
    save(tmp_path, 2)
    found = sorted(p.name for p in tmp_path.iterdir())
    assert found == [".lock", "step-00000001", "step-00000002"]


@pytest.mark.parametrize("call", [0, 1])
def test_a_full_disk_leaves_earlier_checkpoints_and_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    save(tmp_path, 1)
    calls: list[Path] = []
    real = writer.save_file

    def full(tensors: dict[str, torch.Tensor], path: Path) -> None:
        calls.append(path)
        if len(calls) > call:
            path.write_bytes(b"half a file")
            raise OSError(28, "No space left on device")
        real(tensors, path)

    monkeypatch.setattr(writer, "save_file", full)
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path, 2, numbers=1024)
    message = str(caught.value)
    assert "No space left on device" in message
    assert calls[call].name in message
    needed = re.search(r"\((\d+) bytes\) are needed", message)
    assert needed is not None
    assert 0 <= int(needed[1]) - 4096 * (call + 1) < 1024, "tensors, and a little for headers"
    assert "were left" in message
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "step-00000001"]
    monkeypatch.undo()
    save(tmp_path, 2)
    assert checkpoint.load_latest(tmp_path).step == 2


LIMITED = """
import resource, sys, torch
from pathlib import Path
from atomtrain import checkpoint
from atomtrain.errors import CheckpointError
folder = Path(sys.argv[1])
checkpoint.save(folder, 1, {"s": {"w": torch.ones(100)}}, {})
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
try:
    checkpoint.save(folder, 2, {"s": {"w": torch.ones(100_000)}}, {})
except CheckpointError as error:
    print(error)
else:
    sys.exit("the limit was not enforced")
checkpoint.save(folder, 3, {"s": {"w": torch.ones(100)}}, {})
"""


def test_a_write_that_really_fails_is_reported_and_the_process_goes_on(tmp_path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    done = forks.run([sys.executable, "-c", LIMITED, str(tmp_path)], 60)
    assert done.returncode == 0, done.stderr
    assert "File too large" in done.stdout
    assert "390.6 KiB (400000 bytes) are needed" in done.stdout
    assert sorted(p.name for p in tmp_path.glob("*step*")) == ["step-00000001", "step-00000003"]


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="cannot be made a checkpoint folder"):
        save(tmp_path / "file" / "checkpoints", 1)
