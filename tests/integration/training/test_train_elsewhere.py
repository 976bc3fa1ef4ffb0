"""What only Linux has is not needed to plan, simulate and train on a processor.

Nothing here was run on another system: the package's code is shown one that lacks such things.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from atomtrain.checkpoint import load_latest
from atomtrain.swarm.packages import PACKAGES
from tests.support import ROOT
from tests.support.train_processes import Trainer, events_of
from tests.support.waiting import PATIENCE_S

SUPPORT = ROOT / "tests" / "support"


def without(lacking: tuple[str, ...], *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python where these packages are not found."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(SUPPORT / "poor"), *sys.path)),
        "ATOM_TEST_LACKS": ",".join(lacking),
    }
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=environment,
        check=False,
    )


def elsewhere(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `atom` as if on such a system, where hivemind cannot be installed."""
    return without(PACKAGES, str(SUPPORT / "elsewhere.py"), *arguments)


def test_every_module_is_imported() -> None:
    done = without((), str(SUPPORT / "elsewhere.py"), "--imports")
    assert done.returncode == 0, done.stderr
    sources = (ROOT / "src" / "atomtrain").rglob("*.py")
    names = {".".join(path.relative_to(ROOT / "src").with_suffix("").parts) for path in sources}
    assert set(done.stdout.split()) == {n.removesuffix(".__init__") for n in names} - {"atomtrain"}


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "gpt3-13b", "--gpu", "rtx-3090", "--host-memory", "512GiB"),
        ("simulate", "gpt3-small", "--gpu", "rtx-3090", "--peers", "4"),
        ("doctor",),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_command_answers(arguments: tuple[str, ...]) -> None:
    done = elsewhere(*arguments)
    assert done.stdout
    assert done.stderr == ""


def test_the_same_is_trained_and_goes_on(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    # Named, since the kernel is asked which precision the processor is fast with.
    recipe = ("--model", "tiny", "--data", str(trainer.text), "--device", "cpu")
    recipe = (*recipe, "--precision", "fp32", "--micro-batch", "4", "--steps", "2")
    there = elsewhere(*trainer.command("--run", "there", *recipe)[3:])
    assert there.returncode == 0, there.stderr
    done = elsewhere(*trainer.command("--run", "there", "--resume", "--steps", "3")[3:])
    assert done.returncode == 0, done.stderr
    here = without(PACKAGES, *trainer.command("--run", "here", *recipe[:-1], "3")[1:])
    assert here.returncode == 0, here.stderr
    losses = [
        [event["loss"] for event in events_of(tmp_path / "runs" / run / "peer-0", "step")]
        for run in ("there", "here")
    ]
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]
    for run in ("there", "here"):
        load_latest(tmp_path / "runs" / run / "peer-0" / "checkpoints")


def test_the_emulated_device_swaps(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    recipe = ("--model", "tiny", "--data", str(trainer.text), "--steps", "2")
    done = elsewhere(*trainer.command("--run", "mine", *recipe, "--device", "emulated")[3:])
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "mine" / "peer-0"
    assert [event["step"] for event in events_of(folder, "step")] == [1, 2]


def test_state_on_disk_is_refused_in_a_line(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    recipe = ("--model", "tiny", "--data", str(trainer.text), "--disk", str(tmp_path))
    done = elsewhere(*trainer.command("--run", "mine", *recipe, profile=True)[3:])
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("atom: state on disk needs Linux")
    assert "Traceback" not in done.stderr
