"""Disks that are full, fail, or end too soon: one clear line, nothing lost, nothing left behind."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atomtrain
from atomtrain.checkpoint import load_latest
from atomtrain.cli.main import main
from atomtrain.engine.calibration.disk_profile import disk_rates
from atomtrain.engine.devices.disk_file import PAGE_BYTES, DiskFile
from atomtrain.engine.devices.host_memory import aligned_empty
from atomtrain.errors import DiskError, StreamError

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [t for t in threading.enumerate() if t not in before and t.name.startswith("atom-")]
    assert not left


class Failing:
    """Stands for `os.pwritev` or `os.preadv`; from the `good`-th call on it fails."""

    def __init__(self, call: Callable[..., int], good: int, code: int | None) -> None:
        self.call, self.good, self.code = call, good, code

    def __call__(self, descriptor: int, buffers: Any, offset: int) -> int:
        self.good -= 1
        if self.good >= 0:
            return self.call(descriptor, buffers, offset)
        if self.code is None:
            return 0
        raise OSError(self.code, os.strerror(self.code))


def opened(folder: Path, **options: Any) -> tuple[atomtrain.Engine, list[Tensor]]:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    engine = atomtrain.swap(
        model,
        torch.randn(2, 32),
        optimizer=torch.optim.AdamW,
        device="emulated:1GiB/s",
        loss=lambda output: output.pow(2).mean(),
        options=atomtrain.Options(
            **{"profile": False, "segments": 4, "disk": folder, "on_disk": "moments", **options}
        ),
    )
    return engine, [torch.randn(2, 32) for _ in range(6)]


def test_too_little_space_is_found_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r"has .* free for this process, 1048576\.0 TiB are needed"):
        DiskFile(tmp_path, 1 << 60)
    assert not list(tmp_path.iterdir())


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="is not a folder; make it, or name another one for --disk"):
        DiskFile(tmp_path / "none", 1)
    with pytest.raises(DiskError, match="no file can be made in /proc"):
        DiskFile(Path("/proc"), 1)
    with pytest.raises(DiskError, match="is not a folder"):
        opened(tmp_path / "none")


@pytest.mark.parametrize("direct", [True, False])
def test_what_is_written_is_read(
    direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not direct:
        monkeypatch.setattr(DiskFile, "_try_direct", lambda _: False)
    file = DiskFile(tmp_path, 3 * PAGE_BYTES)
    assert not list(tmp_path.iterdir()), "the file has no name"
    offsets = [file.allocate(PAGE_BYTES + 1) for _ in range(4)]
    assert offsets == [0, 2 * PAGE_BYTES, 4 * PAGE_BYTES, 6 * PAGE_BYTES], "it grows"
    source = aligned_empty(2 * PAGE_BYTES)
    source.random_()
    file.write(offsets[3], source)
    target = aligned_empty(2 * PAGE_BYTES)
    file.read(offsets[3], target)
    assert torch.equal(source, target)
    assert (file.read_bytes, file.written_bytes) == (2 * PAGE_BYTES, 2 * PAGE_BYTES)
    file.close()


def test_a_file_system_that_refuses_direct_reads_gets_buffered_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", Failing(os.preadv, 0, errno.EINVAL))
        file = DiskFile(tmp_path, PAGE_BYTES)
    assert not file.direct
    page = aligned_empty(PAGE_BYTES).fill_(7)
    file.write(0, page)
    file.settle()
    file.read(0, page)
    file.close()


def go_on(engine: atomtrain.Engine, batches: list[Tensor], found: list[float]) -> None:
    for batch in batches:
        found.append(engine.step([batch]))
        if len(found) in (1, 3):
            engine.synchronize()


@pytest.mark.parametrize("good", [0, 1, 5])
def test_a_full_disk_loses_nothing(
    good: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, batches = opened(tmp_path, on_disk="nothing")
    with engine:
        losses = [engine.step([batch]) for batch in batches]
    engine, batches = opened(tmp_path)
    with engine:
        found = [engine.step([batch]) for batch in batches[:2]]
        engine.synchronize()
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", Failing(os.pwritev, good, errno.ENOSPC))
            with pytest.raises(DiskError, match=r"it is full .* make room on it"):
                go_on(engine, batches[2:], found)
        assert found == losses[: len(found)]
        with pytest.raises(DiskError):  # and it stays so
            engine.step([batches[0]])
        state = {key: value.clone() for key, value in engine.state_dict().items()}
        moments = engine.optimizer_state()
    again, _ = opened(tmp_path)
    with again:
        again.load_state_dict(state)
        again.load_optimizer_state(moments)
        rest = [again.step([batch]) for batch in batches[len(found) :]]
    assert found + rest == losses


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.EIO, r"reading .* on the disk of .* failed \(Input/output error\)"),
        (None, "something cut it short: resume from the last checkpoint"),
    ],
)
def test_reads_that_fail_are_typed_errors(
    code: int | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, batches = opened(tmp_path)
    try:
        engine.step([batches[0]])
        engine.synchronize()
        monkeypatch.setattr(os, "preadv", Failing(os.preadv, 1, code))
        with pytest.raises(DiskError, match=said):
            go_on(engine, batches[1:2], [])
    finally:
        with pytest.raises(StreamError, match="the engine failed earlier"):
            engine.state_dict()
        engine.close()


def test_the_command_saves_and_says_it_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n}: the light meets the layer.\n" for n in range(400)))
    disk = tmp_path / "disk"
    disk.mkdir()

    def train(run: str, *more: str) -> int:
        return main(
            [
                "train", "--model", "tiny", "--data", str(text), "--steps", "6", "--run", run,
                "--directory", str(tmp_path / "runs"), "--plain", "--threads", "1", "--no-profile",
                "--sequences", "2", "--context", "32", "--device", "emulated:4GiB/s",
                "--host", "127.0.0.1", "--checkpoint-every", "9", "--evaluate-every", "9", *more,
            ]
        )  # fmt: skip

    assert train("straight") == 0
    needs = load_latest(tmp_path / "runs" / "straight" / "peer-0" / "checkpoints")
    bounds = ("--disk", str(disk), "--on-disk", "moments", "--host-memory", "1GiB")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", Failing(os.pwritev, 12, errno.ENOSPC))
        capfd.readouterr()
        assert train("full", *bounds) == 1
        said = capfd.readouterr()
        (line,) = said.err.splitlines()
        assert "it is full (No space left on device" in line
        assert line.endswith("go on with --resume")
        assert "disk       moments: " in said.out
        assert "a day" in said.out
    assert train("full", "--resume", *bounds) == 0
    found = load_latest(tmp_path / "runs" / "full" / "peer-0" / "checkpoints")
    for (name, ours), (_, theirs) in zip(found.shards(), needs.shards(), strict=True):
        if name == "swarm":
            continue
        for key, tensor in ours.items():
            assert torch.equal(tensor, theirs[key]), key
    assert not list(disk.iterdir())


def test_kill_leaves_no_file(tmp_path: Path) -> None:
    code = (
        "import sys, time, torch\n"
        "from pathlib import Path\n"
        "from atomtrain.engine.devices.host_memory import aligned_empty\n"
        "from atomtrain.engine.devices.disk_file import DiskFile\n"
        "file = DiskFile(Path(sys.argv[1]), 1 << 20)\n"
        "file.write(0, aligned_empty(1 << 20))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert not list(tmp_path.iterdir())
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.root
@pytest.mark.skipif(
    os.geteuid() != 0 or bool(os.environ.get("CI")) or shutil.which("mount") is None,
    reason="needs root, to mount a small file system",
)
def test_a_small_file_system(tmp_path: Path) -> None:
    mounted = tmp_path / "small"
    mounted.mkdir()
    options = ["-t", "tmpfs", "-o", "size=8m", "tmpfs", str(mounted)]
    if subprocess.run(["mount", *options], check=False, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        with pytest.raises(DiskError, match=r"8\.0 MiB free .*, 16\.0 MiB are needed"):
            DiskFile(mounted, 16 * MIB)
        file = DiskFile(mounted, 6 * MIB)
        with pytest.raises(DiskError, match=r"2\.0 MiB free"):
            file.allocate(16 * MIB)
        file.close()
        with pytest.raises(DiskError, match="are needed"):
            disk_rates(mounted, cache=tmp_path)
    finally:
        subprocess.run(["umount", str(mounted)], check=True)
