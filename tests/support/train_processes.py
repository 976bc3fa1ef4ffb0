"""The real command `atom train` in processes of its own, and what it leaves behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from atombench import forks
from atombench.churn.peers import ChurnPeer, Crowd
from atomtrain.checkpoint import load_latest
from atomtrain.events import read_events
from tests.support.waiting import PATIENCE_S, wait_until

Event = dict[str, Any]
HELD_TRAIN = Path(__file__).with_name("held_train.py")
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

    def command(self, *arguments: str, profile: bool = False) -> list[str]:
        """Return a command that measures nothing unless it is to have a profile."""
        base = [sys.executable, "-m", "atomtrain.cli.main", "train", "--plain", "--threads", "1"]
        base += [] if profile else ["--no-profile"]
        return [*base, "--host", "127.0.0.1", "--directory", str(self.folder / "runs"), *arguments]

    def run(self, *arguments: str, profile: bool = False) -> subprocess.CompletedProcess[str]:
        """Run to the end."""
        return forks.run(self.command(*arguments, profile=profile), PATIENCE_S)

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
            wait_until(lambda: _stands_still(process.pid))
            assert process.poll() is None, "it ended before it could be stopped"
            process.send_signal(number)
            process.send_signal(signal.SIGCONT)
            code = process.wait(PATIENCE_S)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait(PATIENCE_S)
        (folder,) = set(runs.glob("*/*")) - before
        return folder, code


def _stands_still(pid: int) -> bool:
    """Say whether a process is stopped, or has ended."""
    state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return state in "TZ"


def wait(crowd: Crowd, condition: Callable[[], bool]) -> None:
    """Wait for something that must happen, while no peer that was not killed ends."""
    all_there = lambda: all(peer.running or peer.killed for peer in crowd.peers)  # noqa: E731
    told = lambda: [peer.last_words() for peer in crowd.peers]  # noqa: E731
    assert crowd.wait(lambda: condition() or not all_there(), PATIENCE_S), told()
    assert all_there(), told()


def joined(crowd: Crowd, address: str) -> ChurnPeer:
    """Return a new peer once it has joined, after as many tries as a starved machine takes."""
    while not _has_joined(crowd, peer := crowd.start(address)):
        assert any(text in peer.last_words() for text in _STOOD_STILL), peer.last_words()
        assert len(crowd.peers) < _PEERS_MAX, peer.last_words()
        peer.killed = True
    return peer


def _has_joined(crowd: Crowd, peer: ChurnPeer) -> bool:
    """Wait until a peer has joined, or ended, and say whether it has joined."""
    news = lambda: not peer.running or peer.of("run_started") != []  # noqa: E731
    assert crowd.wait(news, PATIENCE_S), peer.last_words()
    return peer.of("run_started") != []


_STOOD_STILL = (
    "no peer answers", "no peer of run", "network daemon", "did not get ready",
    "could not be fetched", "membership records",
)  # fmt: skip
"""Parts of what a peer is told if others, or itself, stood still for too long."""
_PEERS_MAX = 20


def interrupt(crowd: Crowd, *peers: ChurnPeer) -> None:
    """Have these, which are all that run, save and leave."""
    assert crowd.interrupt(PATIENCE_S) == [*peers], [peer.last_words() for peer in crowd.peers]


def check_shared_rounds(*peers: ChurnPeer) -> int:
    """Check that peers hold the same after each round of several; return how many they share.

    Of equal versions alone nothing follows: a peer that sees nobody for a moment goes on by itself.
    """
    made: dict[tuple[int, int, int], list[str]] = defaultdict(list)
    for peer in peers:
        for event in peer.of("round"):
            if event["outcome"] in ("averaged", "partial") and event["contributors"] > 1:
                made[event["round"], event["fragment"], event["version"]].append(event["digest"])
    assert all(len(set(digests)) == 1 for digests in made.values()), made
    return sum(len(digests) > 1 for digests in made.values())


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
