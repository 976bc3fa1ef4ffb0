"""`atom train` behind routers that translate addresses: peers that cannot dial each other.

Needs root, `nft`, and a kernel that translates addresses; skipped for others, and in CI.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atombench import forks
from atombench.churn.check import compare_checkpoints
from atombench.churn.peers import ChurnPeer
from atombench.links.shaping import Link, Network
from tests.support.namespaces import namespaces
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.root
PUBLIC, HIDDEN = 0, (1, 2)
ENTER = """
import ctypes, os, sys
namespace = os.open(f"/proc/{sys.argv[1]}/ns/net", os.O_RDONLY)
if ctypes.CDLL(None, use_errno=True).setns(namespace, 0):
    raise OSError(ctypes.get_errno(), "cannot enter the network namespace")
from atomtrain.cli.main import main
sys.exit(main(sys.argv[2:]))
"""
TEXT = "".join(f"{n}: peer {n % 7} meets peer {n % 5} behind a router.\n" for n in range(600))


@pytest.fixture
def network() -> Iterator[Network]:
    link = Link(bits_per_s=2e7, round_trip_s=0.04, loss_share=0.002)
    with namespaces(3, HIDDEN, link) as network:
        yield network


class Trainers:
    """`atom train` on several hosts; no process outlives the context."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.peers: list[ChurnPeer] = []
        self._network, self._folder = network, folder
        (folder / "text.txt").write_text(TEXT)

    def __enter__(self) -> Trainers:
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self.peers:
            peer.process.kill()
            peer.process.wait(PATIENCE_S)

    def start(self, host: int, *more: str) -> ChurnPeer:
        name = f"host-{host}"
        folder = self._folder / "runs" / "nat" / name
        folder.mkdir(parents=True)
        command = [
            "train", "--model", "tiny", "--data", str(self._folder / "text.txt"), "--plain",
            "--threads", "1", "--device", "emulated:12MiB/s", "--no-profile", "--steps", "100000",
            "--local-steps", "5", "--directory", str(self._folder / "runs"), "--name", name, *more,
        ]  # fmt: skip
        inside = self._network.entering(host)[2]
        with (folder / "peer.log").open("wb") as log:
            process = forks.Popen(
                [sys.executable, "-c", ENTER, inside, *command],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.peers.append(ChurnPeer(name, folder, process))
        return self.peers[-1]

    def wait(self, condition: Callable[[], Any]) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert all(peer.running for peer in self.peers), [p.last_words() for p in self.peers]
            assert time.monotonic() < until_s, [p.last_words() for p in self.peers]
            time.sleep(0.1)
            for peer in self.peers:
                peer.read()


def averaged_by_all(peer: ChurnPeer) -> bool:
    rounds = (r for r in peer.of("round") if r["outcome"] == "averaged")
    return any(r["contributors"] == 3 for r in rounds)


def relays(seen_by: ChurnPeer) -> dict[str, int]:
    """Return through how many relays each peer is reached, as one knows it."""
    table = json.loads((seen_by.folder / "swarm.json").read_text())
    return {peer["name"]: peer["relays"] for peer in table["peers"]}


def test_peers_behind_nats_train_one_model(network: Network, tmp_path: Path) -> None:
    with Trainers(network, tmp_path) as trainers:
        public = trainers.start(PUBLIC, "--run", "nat", "--relay-limit", "40Mbit/s")
        trainers.wait(lambda: public.training)
        hidden = [trainers.start(host, "--join", public.address) for host in HIDDEN]
        trainers.wait(lambda: all(averaged_by_all(peer) for peer in (public, *hidden)))
        one, other = hidden
        trainers.wait(lambda: relays(one) == {"host-0": 0, "host-1": 1, "host-2": 1})
        # What they gave each other in a round came through the relay, and the round is complete.
        steps = len(other.of("step"))
        trainers.wait(lambda: len(other.of("step")) > steps + 10)
        for peer in reversed(trainers.peers):
            peer.process.send_signal(2)
        for peer in trainers.peers:
            assert peer.process.wait(PATIENCE_S) == 130, peer.last_words()
        assert compare_checkpoints(p.folder / "checkpoints" for p in trainers.peers).unequal == 0
        assert not any("Traceback" in peer.last_words() for peer in trainers.peers)
