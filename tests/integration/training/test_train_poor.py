"""A machine without the packages of a swarm trains alone, and says in a line what it cannot do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from atomtrain.swarm.packages import PACKAGES
from tests.support import ROOT
from tests.support.train_processes import Trainer, events_of
from tests.support.waiting import PATIENCE_S

NEEDS = f"needs packages that are not installed: {', '.join(PACKAGES)}; run pip install"
ADDRESS = "mine@/ip4/192.0.2.1/tcp/4001/p2p/12D3KooW"


def atom(*arguments: str, lacking: tuple[str, ...] = PACKAGES) -> subprocess.CompletedProcess[str]:
    """Run `atom` in a process that finds these packages missing; not a fork of one that has them
    all."""
    poor = str(ROOT / "tests" / "support" / "poor")
    environment = {**os.environ, "PYTHONPATH": poor, "ATOM_TEST_LACKS": ",".join(lacking)}
    command = [sys.executable, "-m", "atomtrain.cli.main", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment, check=False
    )


def test_a_run_trains_alone_says_so_and_goes_on(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    options = trainer.command("--run", "mine")[3:]
    recipe = ("--model", "tiny", "--data", str(trainer.text), "--steps", "2")
    first = atom(*options, *recipe)
    assert first.returncode == 0, first.stderr
    assert first.stderr == (
        "trains alone: others can join only where pip install 'atomtrain[swarm]' has been run\n"
    )
    second = atom(*options, "--resume", "--steps", "3")
    assert second.returncode == 0, second.stderr
    folder = tmp_path / "runs" / "mine" / "peer-0"
    assert [event["step"] for event in events_of(folder, "step")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("train", "--join", ADDRESS), "--join"),
        (("train", "--peers", "3"), "training with 3 peers"),
        (
            ("train", "--average", "gradient", "--target-batch-tokens", "4096", "--run", "mine"),
            "--average gradient",
        ),
        (("identity", "a.key"), "'atom identity'"),
        (("swarm", "ping", ADDRESS), "'atom swarm ping'"),
        (("dashboard", ADDRESS), "the dashboard of a swarm at an address"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_needs_a_swarm_is_refused(arguments: tuple[str, ...], what: str) -> None:
    done = atom(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"atom: {what} {NEEDS} 'atomtrain[swarm]' (on Linux)\n"


def test_a_run_of_others_is_not_resumed_without_them(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    options = trainer.command("--run", "mine")[3:]
    recipe = ("--model", "tiny", "--data", str(trainer.text), "--steps", "1")
    first = trainer.run("--run", "mine", *recipe)
    assert first.returncode == 0, first.stderr
    done = atom(*options, "--resume", "--steps", "2", lacking=("hivemind",))
    assert done.returncode == 2
    assert done.stderr == (
        "atom: --resume of a run that others may join needs packages that are not installed: "
        "hivemind; run pip install 'atomtrain[swarm]' (on Linux)\n"
    )


def test_the_doctor_says_that_this_machine_trains_alone() -> None:
    done = atom("doctor")
    assert "this machine trains alone: hivemind, blake3" in done.stdout
    assert "Traceback" not in done.stderr
