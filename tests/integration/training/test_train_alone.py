"""One peer: it learns, tells everything, keeps to its budget, and stops and resumes to the bit."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from atombench import forks
from atomtrain.checkpoint import load_latest
from tests.support.train_processes import (
    Trainer,
    assert_same_bits,
    events_of,
    final_tensors,
    losses_of,
)
from tests.support.waiting import PATIENCE_S

STEPS = 25
EVERY = 5
RECIPE = (
    *("--model", "tiny", "--steps", str(STEPS), "--dropout", "0.1", "--sequences", "8"),
    *("--micro-batch", "4", "--checkpoint-every", str(EVERY), "--evaluate-every", "10"),
    # Some processors would train in bf16, of which so much fits that nothing need be swapped.
    *("--device", "emulated", "--device-memory", "6MiB", "--precision", "fp32"),
)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return Trainer(tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def straight(trainer: Trainer) -> tuple[Path, str]:
    """The folder and the output of a peer that was never disturbed."""
    done = trainer.run(*RECIPE, "--data", str(trainer.text), profile=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (folder,) = (trainer.folder / "runs").glob("*/peer-0")
    return folder.rename(folder.with_name("straight")), done.stdout


def test_it_learns_and_tells_everything(straight: tuple[Path, str]) -> None:
    folder, output = straight
    losses = losses_of(folder)
    assert [step for step, _ in losses] == list(range(1, STEPS + 1))
    assert abs(losses[0][1] - math.log(512)) < 0.5, "an untrained model guesses"
    assert losses[-1][1] < losses[0][1] - 1.0
    for kind in ("run_started", "plan", "step", "evaluation", "checkpoint", "sample"):
        assert events_of(folder, kind), kind
    (end,) = events_of(folder, "run_finished")
    assert end["reason"] == "completed"
    assert end["step"] == STEPS
    assert Path(end["picture"]).name == "loss.png"
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert load_latest(folder / "checkpoints").step == STEPS
    assert "run completed" in output


def test_every_step_keeps_to_the_budget(straight: tuple[Path, str]) -> None:
    steps = events_of(straight[0], "step")
    (plan,) = events_of(straight[0], "plan")
    assert plan["segments"] > 1, "the budget must force the model to be swapped"
    for step in steps:
        assert step["device_budget_bytes"] == 6 << 20
        assert 0 < step["device_peak_bytes"] <= step["device_budget_bytes"]


def test_generate_continues_a_text(straight: tuple[Path, str]) -> None:
    command = [sys.executable, "-m", "atomtrain.cli.main", "generate", str(straight[0])]
    command += ["--prompt", "12: swarm", "--prompt", "1", "--tokens", "20", "--seed", "3"]
    small = ["--device", "emulated", "--device-memory", "800KiB"]
    whole, streamed = (forks.run([*command, *more], PATIENCE_S) for more in ([], small))
    assert whole.stdout.startswith("12: swarm")
    assert "\n1" in whole.stdout
    assert len(whole.stdout) > len("12: swarm\n1\n")
    assert streamed.stdout == whole.stdout
    assert "tokens/s, streamed on emulated, fp32" in streamed.stderr
    small[-1] = "200KiB"
    refused = forks.run([*command, *small], PATIENCE_S)
    assert refused.returncode == 2
    assert "raise --device-memory above" in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_another_seed_is_another_run(trainer: Trainer, straight: tuple[Path, str]) -> None:
    """The same seed is the same run to the bit: see those that are stopped and resumed."""
    started, code = trainer.stopped(
        *RECIPE, "--data", str(trainer.text), "--seed", "1", at=("step", 3), number=signal.SIGKILL
    )
    assert code == -signal.SIGKILL
    found, expected = losses_of(started), dict(losses_of(straight[0]))
    assert [step for step, _ in found] == [1, 2, 3]
    assert all(loss != expected[step] for step, loss in found)
    started.parent.rename(started.parent.with_name("seed-1"))


WAYS = {
    "asked": (("step", 11), signal.SIGINT),
    "killed after a checkpoint": (("checkpoint", 2), signal.SIGKILL),
    "killed while saving": (("saving", 2), signal.SIGKILL),
    "damaged since": (("step", 2 * EVERY + 2), signal.SIGINT),
}


@pytest.mark.parametrize("way", WAYS)
def test_stopped_and_resumed_is_the_same_to_the_bit(
    trainer: Trainer, straight: tuple[Path, str], way: str
) -> None:
    at, number = WAYS[way]
    data = ("--data", str(trainer.text))
    folder, code = trainer.stopped(*RECIPE, *data, at=at, number=number)
    stopped_at = losses_of(folder)[-1][0]
    assert stopped_at < STEPS, "too late to test anything"
    run = folder.parent.rename(folder.parent.with_name(way.replace(" ", "-")))
    folder = run / "peer-0"
    saved = load_latest(folder / "checkpoints")
    if number == signal.SIGINT:
        assert code == 130
        assert saved.step == stopped_at
        assert events_of(folder, "run_finished")[-1]["reason"] == "interrupted"
    else:
        assert code == -signal.SIGKILL
        assert saved.step >= EVERY
        assert saved.skipped == (), "a kill leaves no damaged checkpoint"
        unfinished = list((folder / "checkpoints").glob(".unfinished-*"))
        assert bool(unfinished) is (way == "killed while saving")
    if way == "damaged since":
        shard = next(iter(sorted(saved.path.glob("*.safetensors"))))
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)

    resumed = trainer.run("--run", run.name, "--resume", *data,
                          "--device", "emulated", "--device-memory", "6MiB")  # fmt: skip

    assert resumed.returncode == 0, resumed.stderr
    if way == "damaged since":
        assert str(saved.path) in resumed.stderr + resumed.stdout, "the damage is named"
    whole = dict(losses_of(straight[0]))
    seen = losses_of(folder)
    assert {step for step, _ in seen} == set(whole), "no batch is lost"
    assert all(loss == whole[step] for step, loss in seen), "and each is the same"
    if number == signal.SIGINT and way != "damaged since":
        assert len(seen) == STEPS, "and none is repeated"
    assert_same_bits(final_tensors(folder), final_tensors(straight[0]))


INTERRUPTED_IMPORT = """
import os, signal, sys

# As in a terminal: tests may run in the background, where SIGINT is ignored and stays so.
signal.signal(signal.SIGINT, signal.default_int_handler)

class Interrupter:
    def find_spec(self, name, *_):
        if name == "numpy.dtypes":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupter())
from atomtrain.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_ctrl_c_in_the_middle_of_an_import_is_quiet(tmp_path: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, "train", "--model", "tiny", "--plain"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=tmp_path, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    assert list(tmp_path.iterdir()) == []


def test_the_comparison_of_bits_can_fail(straight: tuple[Path, str]) -> None:
    """A change of one bit in one tensor is seen."""
    tensors = final_tensors(straight[0])
    other = {name: tensor.clone() for name, tensor in tensors.items()}
    name = next(name for name, tensor in other.items() if tensor.dtype == torch.float32)
    other[name].view(-1)[0] += 1e-6
    with pytest.raises(AssertionError):
        assert_same_bits(tensors, other)


def test_a_run_with_a_key_says_so_to_others_and_is_not_resumed_without(trainer: Trainer) -> None:
    key = trainer.folder / "the key"
    key.write_text("the secret of this run")
    data = ("--data", str(trainer.text), "--prompt", "x")
    begun = trainer.run(*RECIPE, *data, "--run", "closed", "--run-key", str(key), "--steps", "2")
    assert f"join with: atom train --run-key '{key}' --join closed@/ip4/" in begun.stdout
    opened = trainer.run("--run", "closed", "--resume", "--steps", "3")
    assert opened.returncode == 2
    assert "closed to strangers; give --run-key FILE again" in opened.stderr
    assert len(opened.stderr.splitlines()) == 1


def test_a_resumed_run_is_as_old_as_it_was(trainer: Trainer) -> None:
    """Peers judge by a run's age how far anchors can have come."""
    data = ("--data", str(trainer.text), "--prompt", "x")
    before_s = time.time()
    begun = trainer.run(*RECIPE, *data, "--run", "old", "--steps", "2")
    assert begun.returncode == 0, begun.stderr
    (folder,) = (trainer.folder / "runs" / "old").glob("*/checkpoints")
    born_s = load_latest(folder).meta["swarm"]["born_s"]
    assert before_s < born_s < time.time()
    resumed = trainer.run("--run", "old", "--resume", "--steps", "3", *data)
    assert resumed.returncode == 0, resumed.stderr
    saved = load_latest(folder)
    assert saved.step == 3
    assert saved.meta["swarm"]["born_s"] == born_s
