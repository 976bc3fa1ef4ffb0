"""`Trainer` compiles as it is told, and a training that goes on is compiled as it was."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from atomtrain.engine.execution.compiled import CACHE_VARIABLE
from atomtrain.errors import CheckpointError, ConfigError
from atomtrain.events import read_events
from atomtrain.training.trainer import trainer as trainer_module
from atomtrain.training.trainer.callbacks import Callback, Course
from atomtrain.training.trainer.trainer import Trainer
from atomtrain.training.trainer.trainer_arguments import TrainerArguments
from tests.support.compile_times import CompileTimes
from tests.support.swapped import gpt

pytestmark = pytest.mark.usefixtures("assumed_times")


@pytest.fixture
def times(
    assumed_times: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[CompileTimes]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "compiled"))
    torch._dynamo.reset()
    given = CompileTimes()
    given.install(monkeypatch)
    yield given
    torch._dynamo.reset()


class Damaged:
    """A checkpoint whose choice is not one."""

    def __init__(self, path: Path) -> None:
        self.path, self.meta = path, {"compiling": 3}


class Stop(Callback):
    """Ends a training after two steps."""

    def on_step_end(self, trainer: Trainer, course: Course, loss: float) -> None:
        course.stop = course.step == 2


def trainer(folder: str, *callbacks: Callback, **fields: Any) -> Trainer:
    torch.manual_seed(0)
    model, rows = gpt(tied=False), torch.randint(101, (16, 18))
    return Trainer(
        model,
        TrainerArguments(output_dir=folder, micro_batch=4, learning_rate=0.01, **fields),
        [{"input_ids": row[:-1], "labels": row[1:]} for row in rows],
        callbacks=callbacks,
        device="emulated",
        device_memory="1MiB",
    )


def trained(one: Trainer, *, resume: bool = False) -> dict[str, Tensor]:
    with one:
        one.train(resume_from_checkpoint=resume)
        return {name: value.clone() for name, value in one.engine.state_dict().items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(value.equal(other[name]) for name, value in one.items())


def last_lines(folder: str) -> list[str]:
    """Return what a training said of its plan last; the last line is of its layers."""
    plans = [e for e in read_events(Path(folder, "events.jsonl")) if e["event"] == "plan"]
    lines: list[str] = plans[-1]["text"].splitlines()
    return lines


@pytest.mark.parametrize("taken", [True, False])
def test_a_training_that_goes_on_has_the_bits_of_one_that_was_not_interrupted(
    times: CompileTimes, taken: bool
) -> None:
    expected = {way: trained(trainer(f"all-{way}", compile=way)) for way in (True, False)}
    assert not equal(expected[True], expected[False]), "else this would show nothing"
    times.speed_ratio = 1.25 if taken else 0.75
    trained(trainer("parts", Stop()))
    shutil.rmtree("cache")  # as profiles expire
    times.speed_ratio = 2 - times.speed_ratio
    assert equal(trained(trainer("parts"), resume=True), expected[taken])
    said = "compiled" if taken else "not compiled"
    *_, plan, layers = last_lines("parts")
    assert plan == "plan       as before"
    assert layers == f"layers     {said}: as in the checkpoint"


@pytest.mark.parametrize("taken", [True, False])
def test_going_on_opens_one_engine_and_compiles_only_what_was(
    times: CompileTimes, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    times.speed_ratio = 1.25 if taken else 0.75
    trained(trainer("parts", Stop()))
    shutil.rmtree("cache")
    opened: list[Any] = []
    swap = trainer_module.swap
    monkeypatch.setattr(
        trainer_module, "swap", lambda *given, **more: opened.append(more) or swap(*given, **more)
    )
    times.speed_ratio, times.compiled = 2 - times.speed_ratio, 0
    trained(trainer("parts"), resume=True)
    assert [more["options"].compile for more in opened] == [taken]
    assert times.compiled == taken


def test_who_looks_at_the_plan_first_goes_on_as_before_all_the_same(times: CompileTimes) -> None:
    times.speed_ratio = 1.25
    trained(trainer("parts", Stop()))
    shutil.rmtree("cache")
    times.speed_ratio = 0.75
    with trainer("parts") as one:
        assert not one.engine.compiling.compiled
        one.train(resume_from_checkpoint=True)
        assert one.engine.compiling.compiled


def test_a_checkpoint_that_makes_no_sense_leaves_no_thread(
    times: CompileTimes, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(trainer("parts", Stop(), compile=False))
    checkpoint = next(Path("parts/checkpoints").glob("step-*"))
    monkeypatch.setattr(trainer_module, "open_checkpoint", Damaged)
    before = threading.active_count()
    one = trainer("parts")
    with pytest.raises(CheckpointError, match="does not say"):
        one.train(resume_from_checkpoint=checkpoint)
    assert threading.active_count() == before


def test_what_is_said_counts(times: CompileTimes) -> None:
    trained(trainer("parts", Stop(), compile=True))
    trained(trainer("parts", compile=False), resume=True)
    *_, plan, layers = last_lines("parts")
    assert plan == "plan       anew: compiled was True, now it is False"
    assert layers == "layers     not compiled: as chosen"


@pytest.mark.parametrize("given", ["on", None])
def test_what_does_not_say_whether_to_compile_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="compile must be 'auto'"):
        TrainerArguments(compile=given)
