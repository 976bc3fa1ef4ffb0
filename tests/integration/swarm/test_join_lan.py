"""`atom train --join lan`: a run is found on the local network, here that of loopback."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atombench import forks
from atombench.churn.peers import Crowd
from atomtrain.swarm.membership import lan
from tests.support.train_processes import Trainer, interrupt, joined, wait, write_text

SLOW = ("--device", "emulated:12MiB/s", "--model", "tiny", "--local-steps", "5", "--no-profile")


def test_a_peer_joins_a_run_that_it_finds_on_the_network(tmp_path: Path) -> None:
    run = f"lan-{os.getpid()}"  # others on this machine may train runs of their own
    text = write_text(tmp_path / "text.txt")
    arguments = (*SLOW, "--run", run, "--steps", "100000", "--data", str(text))
    with Crowd(tmp_path, run, arguments, popen=forks.Popen) as crowd:
        founder = crowd.start()
        wait(crowd, lambda: founder.training)
        if not lan.search(run, 10.0, "127.0.0.1"):
            pytest.skip("no multicast on this machine's loopback")
        newcomer = joined(crowd, "lan")
        for peer in (founder, newcomer):
            wait(crowd, lambda peer=peer: any(r["contributors"] == 2 for r in peer.of("round")))
        assert newcomer.address.rpartition("@")[0] == run
        interrupt(crowd, founder, newcomer)


def test_a_run_that_nobody_trains_is_told_in_one_line(tmp_path: Path) -> None:
    done = Trainer(tmp_path).run("--run", f"none-{os.getpid()}", "--join", "lan")
    assert done.returncode == 2
    assert "on the local network" in done.stderr
    assert done.stderr.count("\n") == 1
