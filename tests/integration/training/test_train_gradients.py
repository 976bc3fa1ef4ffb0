"""`atom train --average gradient`: peers that are real processes make every step together."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from atombench import forks
from atombench.churn.peers import Crowd
from atomtrain.checkpoint import load_latest
from tests.support.train_processes import HELD_TRAIN, Trainer, joined, wait, write_text
from tests.support.waiting import PATIENCE_S

_GRADIENT = ("--average", "gradient", "--target-batch-tokens", "1024")


def test_peers_are_equal_after_each_step(tmp_path: Path) -> None:
    arguments = (
        "--device", "emulated:12MiB/s", "--model", "tiny", "--steps", "60", "--no-profile",
        "--data", str(write_text(tmp_path / "text.txt")), *_GRADIENT,
    )  # fmt: skip
    both = tmp_path / "both are there"

    def start(command: list[str], **options: Any) -> Any:
        """Start a peer; the first one makes three steps before the second one is there."""
        if not crowd.peers:
            command = [sys.executable, str(HELD_TRAIN), "step", "3", str(both), *command[3:]]
        return forks.Popen(command, **options)

    with Crowd(tmp_path, "both", arguments, popen=start) as crowd:
        founder = crowd.start()
        wait(crowd, lambda: founder.training)
        newcomer = joined(crowd, founder.address)
        both.touch()
        assert crowd.wait(lambda: crowd.running() == [], PATIENCE_S)
        assert [peer.process.returncode for peer in (founder, newcomer)] == [0, 0]
    made: dict[tuple[int, int], set[str]] = defaultdict(set)
    finals = []
    for peer in (founder, newcomer):
        assert peer.of("run_finished")[-1]["reason"] == "completed"
        for event in peer.of("round"):
            if event["contributors"] == 2:
                made[event["round"], event["version"]].add(event["digest"])
        check_steps(peer.events)
        checkpoint = load_latest(peer.folder / "checkpoints")
        finals.append((checkpoint.step, checkpoint.meta["swarm"]["digests"]))
        assert checkpoint.meta["swarm"]["rules"]["average"] == "gradient"
    assert len(made) > 5
    assert all(len(digests) == 1 for digests in made.values())
    # Who stands still in the very last round misses its end, and makes that step alone.
    if all(peer.of("round")[-1]["contributors"] == 2 for peer in (founder, newcomer)):
        assert finals[0] == finals[1]
    losses = [event["loss"] for event in founder.of("step")]
    assert losses[-1] < losses[0]


def check_steps(events: list[dict[str, Any]]) -> None:
    """A step is told once, unless its loss on other text had peers go back to a good anchor."""
    told = 0
    for event in events:
        if event["event"] == "step":
            assert event["step"] > told
            told = event["step"]
        elif event["event"] == "round" and event["outcome"] == "refused":
            assert "back to the last good anchors" in event["reason"]
            told = event["version"] - 1


def test_mistakes_are_told(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    for options, says in (
        (("--average", "gradients"), "Did you mean 'gradient'"),
        (("--average", "gradient"), "belong together"),
        (("--optimizer", "muon", "--run", "r", *_GRADIENT), "for AdamW in float32"),
    ):
        done = trainer.run("--model", "tiny", "--data", str(trainer.text), *options)
        assert done.returncode == 2
        assert says in done.stderr
        assert "Traceback" not in done.stderr
