"""Peers that are real processes train together; the one that founded the run is killed."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from atombench import forks
from atombench.churn.check import disagreements
from atombench.churn.peers import ChurnPeer, Crowd
from atombench.churn.witness import check_means, read_notes
from atomtrain.events import EventTail
from tests.support.held_train import held_founder
from tests.support.train_processes import (
    Event,
    Trainer,
    check_shared_rounds,
    events_of,
    interrupt,
    joined,
    wait,
    write_text,
)
from tests.support.waiting import PATIENCE_S, wait_until

# A slow link makes steps long and leaves the processor to the peers that are starting.
SLOW = ("--device", "emulated:12MiB/s", "--model", "tiny", "--local-steps", "5", "--no-profile")


def test_two_peers_of_one_command(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    run, both = tmp_path / "runs" / "both", tmp_path / "both are there"
    command = trainer.command(
        *SLOW, "--run", "both", "--peers", "2", "--steps", "60", "--data", str(trainer.text),
    )  # fmt: skip
    environment = held_founder("step", 3, both)  # until the other one is there
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with forks.Popen(command, **pipes, env=environment) as launcher:
        try:
            tail = EventTail(run / "peer-1" / "events.jsonl")
            wait_until(
                lambda: (
                    launcher.poll() is not None
                    or any(event["event"] == "run_started" for event in tail.read())
                )
            )
            both.touch()
            _, complaints = launcher.communicate(timeout=PATIENCE_S)
        finally:
            while launcher.poll() is None:  # a second one ends its peers, and a third one kills
                launcher.send_signal(signal.SIGINT)
                time.sleep(0.5)
    assert launcher.returncode == 0, complaints
    assert complaints == ""
    for name in ("peer-0", "peer-1"):
        assert events_of(run / name, "run_finished")[-1]["reason"] == "completed"
        assert max(step["peers"] for step in events_of(run / name, "step")) == 2
        rounds = events_of(run / name, "round")
        assert any(r["outcome"] == "averaged" and r["contributors"] == 2 for r in rounds)
    assert (run / "loss.png").exists()


@pytest.fixture
def crowd(tmp_path: Path) -> Iterator[Crowd]:
    text = write_text(tmp_path / "text.txt")
    arguments = (*SLOW, "--steps", "100000", "--checkpoint-every", "1000", "--data", str(text))
    arguments += ("--outer", "mean")  # so that a witness can do the sums again
    with Crowd(tmp_path, "crowd", arguments, witness=True, popen=forks.Popen) as crowd:
        yield crowd


def rounds_together(peer: ChurnPeer, since_s: float = 0.0) -> list[Event]:
    """Return the rounds in which the peer averaged with another one since then."""
    rounds = (r for r in peer.of("round") if r["time_s"] > since_s)
    return [r for r in rounds if r["outcome"] == "averaged" and r["contributors"] > 1]


def test_the_founder_is_killed_and_a_newcomer_joins_through_the_survivor(crowd: Crowd) -> None:
    founder = crowd.start()
    wait(crowd, lambda: founder.training)
    survivor = joined(crowd, founder.address)
    wait(crowd, lambda: rounds_together(founder) and rounds_together(survivor))
    wait(crowd, lambda: all(p.of("step")[-1]["loss"] < 4 for p in (founder, survivor)))
    # What they know by now is in the anchors once each fragment was averaged again.
    learnt_s = time.time()
    every = {r["fragment"] for r in founder.of("round")}
    wait(crowd, lambda: every <= {r["fragment"] for r in rounds_together(survivor, learnt_s)})
    crowd.kill(founder)
    assert founder.ended_s is not None
    steps_before = len(survivor.of("step"))

    newcomer = joined(crowd, survivor.address)
    killed_s = founder.ended_s
    wait(crowd, lambda: rounds_together(newcomer) and rounds_together(survivor, killed_s))
    wait(crowd, lambda: len(survivor.of("step")) > steps_before + 3)
    untrained = founder.of("step")[0]["loss"]
    first = newcomer.of("step")[0]
    assert first["loss"] < untrained - 1.5, "it starts from what the others had learnt"
    # The survivor's step, as its last record told: the founder may have been far ahead of it.
    assert first["step"] > survivor.of("step")[0]["step"], "and goes on at their step"
    # The record of the killed one lasts until its expiry for those that need not talk to it.
    wait(crowd, lambda: newcomer.of("step")[-1]["peers"] == 2)

    interrupt(crowd, survivor, newcomer)
    assert [d for d in disagreements(crowd.peers) if d.outcome == "lasting"] == []
    assert check_shared_rounds(founder, survivor, newcomer) > 0
    means = check_means((p.peer_id, note) for p in crowd.peers for note in read_notes(p.notes))
    assert means.right > 0
    assert means.wrong == 0
    # The kernel ends a dead peer's helpers: soon, not at once.
    wait_until(lambda: crowd.left_over() == [])
