"""`atom train --average gradient`: peers that are real processes make every step together."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from train_processes import Trainer, events_of

from atomtrain.checkpoint import load_latest

_GRADIENT = ("--average", "gradient", "--target-batch-tokens", "1024")


def test_peers_are_equal_after_each_step(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    done = trainer.run(
        "--device", "emulated:12MiB/s", "--model", "tiny", "--run", "both", "--peers", "2",
        "--steps", "60", "--data", str(trainer.text), "--no-profile", *_GRADIENT, within_s=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made: dict[int, set[str]] = defaultdict(set)
    steps_of_two = 0
    finals = []
    for name in ("peer-0", "peer-1"):
        folder = tmp_path / "runs" / "both" / name
        assert events_of(folder, "run_finished")[-1]["reason"] == "completed"
        for event in events_of(folder, "round"):
            if event["contributors"] == 2:
                made[event["version"]].add(event["digest"])
                steps_of_two += 1
        steps = [event["step"] for event in events_of(folder, "step")]
        assert steps == sorted(set(steps)), "a step is told once"
        checkpoint = load_latest(folder / "checkpoints")
        finals.append((checkpoint.step, checkpoint.meta["swarm"]["digests"]))
        assert checkpoint.meta["swarm"]["rules"]["average"] == "gradient"
    assert steps_of_two > 10
    assert all(len(digests) == 1 for digests in made.values())
    assert finals[0] == finals[1]
    losses = [e["loss"] for e in events_of(tmp_path / "runs" / "both" / "peer-0", "step")]
    assert losses[-1] < losses[0]


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
