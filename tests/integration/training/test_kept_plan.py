"""`atom train --resume` and `Trainer` follow the checkpoint's plan, whatever is measured now."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from atomtrain.checkpoint import load_latest, save
from atomtrain.cli.main import main
from atomtrain.events import read_events
from atomtrain.training.trainer.callbacks import Callback, Course
from atomtrain.training.trainer.trainer import Trainer
from atomtrain.training.trainer.trainer_arguments import TrainerArguments
from tests.support.changing_profile import ChangingProfile
from tests.support.swapped import gpt

COMMON = [
    "--model", "tiny", "--data", "text.txt", "--vocabulary", "300", "--context", "16",
    "--sequences", "4", "--micro-batch", "1", "--device", "emulated:4GiB/s",
    "--device-memory", "64MiB", "--host", "127.0.0.1", "--precision", "fp32",
    "--plain", "--threads", "1", "--steps", "4", "--evaluate-every", "2",
    "--checkpoint-every", "2",
]  # fmt: skip

pytestmark = pytest.mark.usefixtures("assumed_times", "no_search_for_a_fit")


@pytest.fixture
def profile(
    assumed_times: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> ChangingProfile:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the cat sat on the mat and the dog lay by the door\n" * 200)
    given = ChangingProfile()
    given.install(monkeypatch)
    return given


def told(folder: Path) -> tuple[int, str | None]:
    """Return the last plan's segments, and what was said of the plan before."""
    event = [e for e in read_events(folder / "events.jsonl") if e["event"] == "plan"][-1]
    lines = [line for line in event["text"].splitlines() if line.startswith("plan  ")]
    return event["segments"], lines[0].removeprefix("plan       ") if lines else None


def train(*more: str) -> tuple[int, str | None]:
    assert main(["train", "--run", "mine", *COMMON, *more]) == 0
    return told(Path("runs/mine/peer-0"))


def newest() -> Any:
    return load_latest(Path("runs/mine/peer-0/checkpoints"))


def shards() -> dict[str, Any]:
    return {name: {k: v.clone() for k, v in held.items()} for name, held in newest().shards()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(
        value.equal(other[shard][key]) for shard, held in one.items() for key, value in held.items()
    )


def test_a_resumed_run_follows_its_plan_unless_something_else_is_asked_for(
    profile: ChangingProfile, capsys: pytest.CaptureFixture[str]
) -> None:
    segments, before = train()
    assert segments > 1
    assert before is None
    straight = shards()
    shutil.rmtree(newest().path)  # as if interrupted after two steps
    shutil.copytree("runs", "interrupted")
    profile.several = False
    capsys.readouterr()
    assert train("--resume") == (segments, "as before")
    assert "  plan       as before\n" in capsys.readouterr().out
    assert same(shards(), straight)
    for more, why in (
        (["--device-memory", "65MiB"], "device memory was 64.0 MiB (67108864 bytes), now it is "),
        (["--profile-again"], "everything is measured again"),
    ):
        shutil.rmtree("runs")
        shutil.copytree("interrupted", "runs")
        segments, line = train("--resume", *more)
        assert segments == 1
        assert line is not None
        assert line.startswith(f"anew: {why}")
        assert not same(shards(), straight), "else the plan would not matter"


@pytest.mark.parametrize("plan", [{"slots": 2}, "os.system('true')\n", [None]])
def test_a_checkpoint_whose_plan_is_not_one_is_refused_in_a_line(
    profile: ChangingProfile, plan: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    train("--steps", "2")
    kept = newest()
    texts = dict(kept.texts)
    save(kept.path.parent, kept.step, shards(), {**kept.meta, "plan": plan}, texts)
    capsys.readouterr()
    assert main(["train", "--run", "mine", *COMMON, "--resume"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "holds what is not a plan (a kept plan is" in line
    assert line.endswith("; give an earlier checkpoint")


def test_a_checkpoint_of_an_earlier_version_has_no_plan_and_is_planned(
    profile: ChangingProfile,
) -> None:
    train("--steps", "2")
    kept = newest()
    meta = {name: value for name, value in kept.meta.items() if name != "plan"}
    save(kept.path.parent, kept.step, shards(), meta, dict(kept.texts))
    profile.several = False
    assert train("--resume") == (1, None)


class Stop(Callback):
    """Ends a training after two steps."""

    def on_step_end(self, trainer: Trainer, course: Course, loss: float) -> None:
        course.stop = course.step == 2


def trainer(folder: str, *callbacks: Callback, **fields: Any) -> Trainer:
    torch.manual_seed(0)
    model, rows = gpt(), torch.randint(101, (24, 18))
    arguments = {"micro_batch": 2, "micro_batches": 3, "learning_rate": 0.01, **fields}
    return Trainer(
        model,
        TrainerArguments(output_dir=folder, **arguments),
        [{"input_ids": row[:-1], "labels": row[1:]} for row in rows],
        callbacks=callbacks,
        device="emulated",
        device_memory="64MiB",
    )


def trained(one: Trainer, *, resume: bool = False) -> dict[str, Tensor]:
    with one:
        one.train(resume_from_checkpoint=resume)
        return {name: value.clone() for name, value in one.engine.state_dict().items()}


@pytest.mark.parametrize("looks_first", [False, True])
def test_a_trainer_goes_on_by_the_plan_of_its_checkpoint(
    profile: ChangingProfile, looks_first: bool
) -> None:
    straight = trained(trainer("straight"))
    trained(trainer("parts", Stop()))
    profile.several = False
    other = trained(trainer("other"))
    assert not all(value.equal(other[name]) for name, value in straight.items())
    again = trainer("parts")
    if looks_first:
        assert again.engine.plan.segments == 1
    found = trained(again, resume=True)
    segments, before = told(Path("parts"))
    assert segments > 1
    assert before == "as before"
    assert all(value.equal(found[name]) for name, value in straight.items())


def test_what_a_checkpoint_keeps_is_plain(profile: ChangingProfile) -> None:
    trained(trainer("parts", Stop()))
    meta = load_latest(Path("parts/checkpoints")).meta
    assert set(meta["plan"]) == {"made_for", "micro_batches", "on_disk", "shape"}
    assert json.loads(json.dumps(meta["plan"])) == meta["plan"]
