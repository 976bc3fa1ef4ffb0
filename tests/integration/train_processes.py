"""The real command `atom train` in processes of its own, and what it leaves behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import forks
import torch

from atomtrain.checkpoint import load_latest
from atomtrain.events import read_events

Event = dict[str, Any]
HELD_TRAIN = Path(__file__).with_name("held_train.py")
_DEADLINE_S = 120.0
NAMES = ["peer", "swarm", "layer", "slot", "anchor", "round", "token", "plan", "step", "light"]


def write_text(path: Path, lines: int = 600) -> Path:
    """Write a small text with something to learn in it."""
    path.write_text(
        "".join(
            f"{n}: {NAMES[n % 10]} {NAMES[n % 7]} meets {NAMES[n % 3]}.\n" for n in range(lines)
        )
    )
    return path


class Trainer:
    """Runs `atom train` with the tiny model below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.text = write_text(folder / "text.txt")

    def command(self, *arguments: str) -> list[str]:
        base = [sys.executable, "-m", "atomtrain.cli.main", "train", "--plain", "--threads", "1"]
        return [*base, "--host", "127.0.0.1", "--directory", str(self.folder / "runs"), *arguments]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run to the end."""
        return forks.run(self.command(*arguments), _DEADLINE_S)

    def stopped(self, *arguments: str, at: tuple[str, int], number: int) -> tuple[Path, int]:
        """Run until the process stands still at `(kind, count)`, as `held_train` says; signal it.

        Returns the peer's folder and the exit code.
        """
        runs = self.folder / "runs"
        before = set(runs.glob("*/*"))
        kind, count = at
        command = [sys.executable, str(HELD_TRAIN), kind, str(count), ""]
        command += self.command(*arguments)[3:]
        process = forks.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        try:
            until_s = time.monotonic() + _DEADLINE_S
            while not _stands_still(process.pid):
                assert process.poll() is None, "it ended before it could be stopped"
                assert time.monotonic() < until_s
                time.sleep(0.01)
            process.send_signal(number)
            process.send_signal(signal.SIGCONT)
            code = process.wait(_DEADLINE_S)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait(_DEADLINE_S)
        (folder,) = set(runs.glob("*/*")) - before
        return folder, code


def _stands_still(pid: int) -> bool:
    """Say whether a process is stopped, or has ended."""
    state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return state in "TZ"


def events_of(folder: Path, kind: str) -> list[Event]:
    """Return the events of a kind that a peer wrote."""
    return [event for event in read_events(folder / "events.jsonl") if event["event"] == kind]


def losses_of(folder: Path) -> list[tuple[int, float]]:
    """Return step and loss of each step event."""
    return [(event["step"], event["loss"]) for event in events_of(folder, "step")]


def final_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return parameters and optimizer state of the newest checkpoint, by shard and name."""
    checkpoint = load_latest(folder / "checkpoints")
    return {
        f"{shard}:{name}": tensor.clone()
        for shard, tensors in checkpoint.shards()
        if shard != "swarm"
        for name, tensor in tensors.items()
    }


def assert_same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        one, other = (side[name].contiguous().reshape(-1) for side in (left, right))
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), name
