"""When a machine is measured again within a run, and what is told of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from atomtrain.engine import replanning
from atomtrain.engine.replanning import FASTER, PlannedAgain, Replanning
from atomtrain.errors import PlanError
from atomtrain.training.run_events import plan_again
from atomtrain.views.runs.event_text import event_line


class World:
    """A clock, what others have of the processor, and an engine that was measured beside them."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.others = 0.0
        """Since the last look."""
        self.others_now = 0.0
        self.asked: list[tuple[Any, float]] = []
        self.after = 0.02
        self.fault: Exception | None = None
        self.engine: Any = SimpleNamespace(
            planner=SimpleNamespace(crowded_share=0.6), plan=SimpleNamespace(step_s=5.0),
            can_plan_again=True, plan_by=self.plan_by,
        )  # fmt: skip

    def plan_by(self, measure: Any, micro_batch: Any, faster: float) -> bool:
        self.asked.append((micro_batch, faster))
        if self.fault is not None:
            raise self.fault
        self.engine.planner.crowded_share = self.after
        self.engine.plan.step_s = 2.0
        return True


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    watch = SimpleNamespace(crowded_share=lambda: world.others)
    monkeypatch.setattr(replanning, "Watch", lambda: watch)
    monkeypatch.setattr(replanning, "crowded_now", lambda: world.others_now)
    clock = SimpleNamespace(monotonic=lambda: world.now_s)
    monkeypatch.setattr(replanning, "time", clock)
    return world


def test_it_is_measured_once_when_the_others_are_gone(world: World) -> None:
    watching = Replanning()
    assert watching.between_steps(world.engine, ["batch"]) is None, "too early to tell"
    world.now_s, world.others = 11.0, 0.5
    assert watching.between_steps(world.engine, ["batch"]) is None, "they are still there"
    world.now_s, world.others = 20.0, 0.1
    assert watching.between_steps(world.engine, ["batch"]) is None, "looked nine seconds ago"
    world.now_s, world.others_now = 22.0, 0.5
    assert watching.between_steps(world.engine, ["batch"]) is None, "they have just come back"
    assert world.asked == []
    world.now_s, world.others_now = 33.0, 0.1
    assert watching.between_steps(world.engine, ["batch"]) == PlannedAgain(True, 5.0)
    assert world.asked == [("batch", FASTER)]
    world.now_s = 50.0
    assert watching.between_steps(world.engine, ["batch"]) is None, "it was quiet this time"
    assert len(world.asked) == 1


@pytest.mark.parametrize(("share", "able"), [(0.1, True), (0.6, False)])
def test_nothing_is_measured_without_a_reason_or_where_it_cannot_be(
    world: World, share: float, able: bool
) -> None:
    watching, world.now_s = Replanning(), 100.0
    world.engine.planner.crowded_share, world.engine.can_plan_again = share, able
    assert watching.between_steps(world.engine, ["batch"]) is None
    assert world.asked == []


def test_what_was_not_measured_after_all_is_not_told(world: World) -> None:
    watching, world.now_s, world.after = Replanning(), 100.0, 0.6
    assert watching.between_steps(world.engine, ["batch"]) is None
    assert len(world.asked) == 1


def test_it_is_told_and_a_failure_is_a_warning(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atomtrain.training.run_events.tell_plan", lambda *_: None)
    told: list[dict[str, Any]] = []
    events: Any = SimpleNamespace(emit=lambda kind, **rest: told.append({"event": kind, **rest}))
    session: Any = SimpleNamespace(engine=world.engine, options=SimpleNamespace(compile="auto"))
    watching = Replanning()
    assert plan_again(session, watching, [{}], events) is False
    assert told == []
    world.now_s, world.fault = 11.0, PlanError("too little memory")
    assert plan_again(session, watching, [{}], events) is False
    world.now_s, world.fault = 30.0, None
    assert plan_again(session, watching, [{}], events) is True
    assert [event_line(event) for event in told] == [
        "warning: the plan stays: too little memory",
        "measured again, since other programs leave the processor alone now: steps are predicted "
        "at 2.00 s by another plan, not at 5.00 s",
    ]
    assert event_line({"event": "planned_again", "predicted_step_s": "x"}) is None
