"""What `Trainer` tells of its run, in the words of the event stream."""

from __future__ import annotations

from pathlib import Path

from atomtrain.events import EventLog
from atomtrain.models.making import parameter_count
from atomtrain.training.trainer.callbacks import Training
from atomtrain.views.runs.plan_event import tell_plan


def tell_start(trainer: Training, events: EventLog) -> None:
    """Tell how a training begins, and the plan that it follows."""
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
    tell_plan(engine, events)


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
        step_s=report.step_s,
        link_wait_share=report.link_wait_s / report.step_s,
        device_peak_bytes=report.device_peak_bytes,
        device_reserved_bytes=report.device_reserved_bytes,
        allocation_retries=report.allocation_retries,
        device_budget_bytes=engine.device.memory_bytes,
        state_bytes=engine.state_bytes,
        learning_rate=engine.optimizer.param_groups[0]["lr"],
        time_left_s=report.step_s * (course.steps - course.step),
    )
