"""The plan that training follows, as an event, and what a step was like beside it."""

from __future__ import annotations

import mmap
import time
from pathlib import Path
from typing import Any, Literal

from atomtrain.engine.calibration.profile_cache import StepTimes, doubt_profile, is_off
from atomtrain.engine.calibration.profiling import crowding_warning
from atomtrain.engine.engine import Engine
from atomtrain.engine.replanning import PlannedAgain
from atomtrain.events import EventLog
from atomtrain.planning.cost.timeline import Span

_STATM = Path("/proc/self/statm")
_MOST_SPANS = 5000
"""Beyond them a step's spans are no picture any more, and too long a line."""


def tell_plan(engine: Engine, events: EventLog, asked: bool | Literal["auto"]) -> None:
    """Tell an engine's plan, and what makes its predictions doubtful.

    `asked` is whether layers were to be compiled; a checkpoint may have answered otherwise.
    """
    plan, compiling, before = engine.plan, engine.compiling, engine.planner.before
    lines = [plan.describe(), *([f"plan       {before}"] if before else [])]
    if engine.planner.options.compile != asked:
        compiling = compiling._replace(why="as in the checkpoint")
    events.emit(
        "plan",
        text="\n".join((*lines, f"layers     {compiling}")),
        segments=plan.segments,
        predicted_step_s=plan.step_s,
        predicted_device_peak_bytes=plan.device_peak_bytes,
        host_bytes=plan.host_bytes,
        bound=plan.bound,
        compiled=compiling.compiled,
        memory=[region.to_json() for region in engine.memory_map()],
    )
    if warning := crowding_warning(engine.planner.crowded_share):
        events.emit("warning", message=warning)


def tell_planned_again(engine: Engine, again: PlannedAgain, events: EventLog) -> None:
    """Tell what a new profile within the run brought."""
    events.emit(
        "planned_again",
        changed=again.changed,
        predicted_before_s=again.predicted_before_s,
        predicted_step_s=engine.plan.step_s,
    )


def tell_prediction(engine: Engine, times: StepTimes, events: EventLog) -> None:
    """Tell at the end what steps took beside what was predicted; doubt a profile that misled."""
    measured_s, predicted_s = times.steady_s, engine.plan.step_s
    if measured_s is None:
        return
    doubted = False
    if is_off(predicted_s, measured_s) and engine.planner.options.profile:
        doubted = doubt_profile(engine.device)
    events.emit(
        "prediction", predicted_step_s=predicted_s, step_s=measured_s, profiles_anew=doubted
    )


def measured_of(engine: Engine) -> dict[str, float | None]:
    """Return what the events of steps tell of the last step's time, memory and gradients."""
    report = engine.last
    assert report is not None
    return {
        "step_s": report.step_s,
        "link_wait_share": report.link_wait_s / report.step_s,
        "device_peak_bytes": report.device_peak_bytes,
        "device_reserved_bytes": report.device_reserved_bytes,
        "allocation_retries": report.allocation_retries,
        "device_budget_bytes": engine.device.memory_bytes,
        "state_bytes": engine.state_bytes,
        "host_resident_bytes": _resident_bytes(),
        "gradient_norm": engine.gradient_norm,
    }


def tell_checkpoint(path: Path, step: int, duration_s: float, events: EventLog) -> None:
    """Tell of a checkpoint that has been written."""
    size_bytes = sum(file.stat().st_size for file in path.iterdir())
    events.emit("checkpoint", step=step, path=str(path), bytes=size_bytes, duration_s=duration_s)


def _resident_bytes() -> int | None:
    """Return the memory that this process has on the host now; `None` where Linux is not."""
    try:
        pages = int(_STATM.read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * mmap.PAGESIZE


def tell_timeline(engine: Engine, step: int, events: EventLog) -> None:
    """Tell what each stream did in the last step, which was recorded; waits for its updates."""
    assert engine.last is not None
    step_s = engine.last.step_s
    start_s = time.time() - step_s
    measured = engine.last_spans()
    predicted = engine.predicted_spans()
    if max(len(measured), len(predicted)) > _MOST_SPANS:
        return
    events.emit(
        "timeline",
        step=step,
        start_time_s=start_s,
        step_s=step_s,
        predicted_step_s=engine.plan.step_s,
        measured=[_plain_span(span) for span in measured],
        predicted=[_plain_span(span) for span in predicted],
    )


def _plain_span(span: Span) -> list[Any]:
    """Return stream, label, start and end in seconds; a microsecond is exact enough to look at."""
    return [span.stream, span.label, round(span.start_s, 6), round(span.end_s, 6)]
