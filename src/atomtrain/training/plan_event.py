"""The plan that training follows, as an event; and what makes its predictions doubtful."""

from __future__ import annotations

from atomtrain.events import EventLog
from atomtrain.swapping.crowding import crowding_warning
from atomtrain.swapping.engine import Engine


def tell_plan(engine: Engine, events: EventLog) -> None:
    """Tell an engine's plan."""
    plan = engine.plan
    events.emit(
        "plan",
        text=plan.describe(),
        segments=plan.segments,
        predicted_step_s=plan.step_s,
        predicted_device_peak_bytes=plan.device_peak_bytes,
        host_bytes=plan.host_bytes,
        bound=plan.bound,
        memory=[region.to_json() for region in engine.memory_map()],
    )
    if warning := crowding_warning(engine.planner.crowded_share):
        events.emit("warning", message=warning)
