"""What a callback of `Trainer` is told, and what it may ask for."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from atomtrain.events import EventLog
from atomtrain.models.making import parameter_count
from atomtrain.units import format_seconds
from atomtrain.views.runs.plan_event import measured_of, tell_plan

if TYPE_CHECKING:
    from torch import nn

    from atomtrain.engine.engine import Engine
    from atomtrain.training.trainer.trainer_arguments import TrainerArguments


@dataclass
class Course:
    """Where a training is, and how it came there."""

    step: int = 0
    """Optimizer steps done."""
    steps: int = 0
    """Of the whole training."""
    epoch: float = 0.0
    """Passes over the data, with fractions."""
    tokens: int = 0
    """Trained on so far; stays 0 where micro-batches have no `input_ids`."""
    losses: list[float] = field(default_factory=list)
    """Of each step, in nats per token for a language model."""
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    """Step and loss of each evaluation."""
    stop: bool = False
    """Set it to end the training after this step."""


class Training(Protocol):
    """What callbacks see of a `Trainer`."""

    model: nn.Module
    args: TrainerArguments
    course: Course

    @property
    def engine(self) -> Engine:
        """The open engine."""
        ...


class Callback:
    """Base of callbacks: override what you need. All run on the training thread.

    `trainer` is the `Trainer` that calls; subclasses may say so in their annotations.
    """

    def on_train_begin(self, trainer: Any, course: Course) -> None:
        """The engine is open; no step has run."""

    def on_step_end(self, trainer: Any, course: Course, loss: float) -> None:
        """A step has ended; its updates may still run on the host."""

    def on_evaluate(self, trainer: Any, course: Course, loss: float) -> None:
        """An evaluation has ended."""

    def on_save(self, trainer: Any, course: Course, path: Path) -> None:
        """A checkpoint has been written to `path`."""

    def on_train_end(self, trainer: Any, course: Course) -> None:
        """The last step has ended, and everything is saved."""


class Progress(Callback):
    """Writes a line on standard output now and then: the mean loss since the line before."""

    def __init__(self, every_steps: int) -> None:
        """Write a line every so many steps, at least 1, and after the last one."""
        self._every_steps = every_steps
        self._told_step = 0

    def on_train_begin(self, trainer: Training, course: Course) -> None:
        self._told_step = course.step

    def on_step_end(self, trainer: Training, course: Course, loss: float) -> None:
        report = trainer.engine.last
        if report is None or (course.step % self._every_steps and course.step < course.steps):
            return
        losses = course.losses[self._told_step : course.step]
        self._told_step = course.step
        left_s = report.step_s * (course.steps - course.step)
        left = f", {format_seconds(left_s)} left" if left_s else ""
        sys.stdout.write(
            f"step {course.step} of {course.steps}: loss {sum(losses) / len(losses):.4f}, "
            f"{format_seconds(report.step_s)} a step{left}\n"
        )
        sys.stdout.flush()

    def on_evaluate(self, trainer: Training, course: Course, loss: float) -> None:
        sys.stdout.write(f"step {course.step} of {course.steps}: held-out loss {loss:.4f}\n")
        sys.stdout.flush()


def tell_start(trainer: Training, events: EventLog) -> None:
    engine = trainer.engine
    events.emit(
        "run_started",
        run=Path(trainer.args.output_dir).name,
        model=type(trainer.model).__name__,
        device=engine.device_name,
        device_memory_bytes=engine.device.memory_bytes,
        parameters=parameter_count(trainer.model),
        state_bytes=engine.state_bytes,
        steps=trainer.course.steps,
    )
    tell_plan(engine, events, trainer.args.compile)


def tell_step(trainer: Training, events: EventLog, loss: float, tokens: int | None) -> None:
    """Tell the step that has just ended; `tokens` is `None` where samples have none."""
    engine, course = trainer.engine, trainer.course
    report = engine.last
    assert report is not None
    numbers: dict[str, float] = {}
    if tokens is not None:
        course.tokens += tokens
        numbers = {
            "tokens": tokens,
            "tokens_total": course.tokens,
            "tokens_per_s": tokens / report.step_s,
        }
    events.emit(
        "step",
        step=course.step,
        steps=course.steps,
        loss=loss,
        **numbers,
        **measured_of(engine),
        learning_rate=max(group["lr"] for group in engine.optimizer.param_groups),
        time_left_s=report.step_s * (course.steps - course.step),
    )
