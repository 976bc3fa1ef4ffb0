"""Peers that are real processes train together; the one that founded the run is killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import forks
import pytest
from train_processes import Trainer, events_of, write_text

from atomtrain.benchmarks.churn_check import compare_checkpoints, disagreements
from atomtrain.benchmarks.churn_peers import ChurnPeer, Crowd

# A slow link makes steps long and leaves the processor to the peers that are starting.
SLOW = ("--device", "emulated:12MiB/s", "--model", "tiny", "--local-steps", "5", "--no-profile")


def test_two_peers_of_one_command(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    done = trainer.run(
        *SLOW, "--run", "both", "--peers", "2", "--steps", "150", "--data", str(trainer.text),
        within_s=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for name in ("peer-0", "peer-1"):
        folder = tmp_path / "runs" / "both" / name
        assert events_of(folder, "run_finished")[-1]["reason"] == "completed"
        assert max(step["peers"] for step in events_of(folder, "step")) == 2
        rounds = events_of(folder, "round")
        assert any(r["outcome"] == "averaged" and r["contributors"] == 2 for r in rounds)
    assert (tmp_path / "runs" / "both" / "loss.png").exists()


@pytest.fixture
def crowd(tmp_path: Path) -> Iterator[Crowd]:
    text = write_text(tmp_path / "text.txt")
    arguments = (*SLOW, "--steps", "100000", "--checkpoint-every", "1000", "--data", str(text))
    with Crowd(tmp_path, "crowd", arguments, popen=forks.Popen) as crowd:
        yield crowd


def wait(crowd: Crowd, condition: object, within_s: float = 60.0) -> None:
    """Wait for something that must happen, while no peer that was not killed ends."""
    assert callable(condition)
    assert crowd.wait(condition, within_s), [peer.last_words() for peer in crowd.peers]
    assert all(peer.running or peer.killed for peer in crowd.peers)


def together(peer: ChurnPeer, since_s: float) -> bool:
    """Whether the peer averaged with another one since then."""
    rounds = (r for r in peer.of("round") if r["time_s"] > since_s)
    return any(r["outcome"] == "averaged" and r["contributors"] > 1 for r in rounds)


def test_the_founder_is_killed_and_a_newcomer_joins_through_the_survivor(crowd: Crowd) -> None:
    founder = crowd.start()
    wait(crowd, lambda: founder.training)
    survivor = crowd.start(founder.address)
    wait(crowd, lambda: together(founder, 0) and together(survivor, 0))
    wait(crowd, lambda: founder.of("step")[-1]["loss"] < 4)
    crowd.kill(founder)
    assert founder.ended_s is not None
    steps_before = len(survivor.of("step"))

    newcomer = crowd.start(survivor.address)
    killed_s = founder.ended_s
    wait(crowd, lambda: together(newcomer, killed_s) and together(survivor, killed_s))
    assert len(survivor.of("step")) > steps_before + 3, "the survivor goes on meanwhile"
    untrained = founder.of("step")[0]["loss"]
    first = newcomer.of("step")[0]
    assert first["loss"] < untrained - 1.5, "it starts from what the others had learnt"
    # The survivor's step, as its last record told: the founder may have been far ahead of it.
    assert first["step"] > survivor.of("step")[0]["step"], "and goes on at their step"
    # The record of the killed one lasts until its expiry for those that need not talk to it.
    wait(crowd, lambda: newcomer.of("step")[-1]["peers"] == 2)

    saved = crowd.interrupt(30)
    assert saved == [survivor, newcomer]
    assert [d for d in disagreements(crowd.peers) if d.outcome == "lasting"] == []
    assert compare_checkpoints(p.folder / "checkpoints" for p in saved).unequal == 0
    assert crowd.left_over() == [], "no helper process outlives its peer"
