"""Steps that were not as predicted have the machine measured anew, once; and the run says so."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atomtrain.engine.calibration import profile_cache
from atomtrain.engine.calibration.profile_cache import (
    ProfileCache,
    StepTimes,
    doubt_profile,
    is_off,
    machine_key,
)
from atomtrain.engine.devices.processor import EmulatedDevice
from atomtrain.views.runs import plan_event
from atomtrain.views.runs.event_text import event_line
from tests.unit.engine.test_profile_cache import device, measured, profile

__all__ = ["device", "measured"]  # fixtures


def test_the_slow_first_steps_and_single_ones_do_not_count() -> None:
    times = StepTimes()
    for step_s in (90.0, 80.0, 1.0, 1.2, 50.0, 1.1):
        times.note(step_s)
        assert times.steady_s is None
    times.note(1.1)
    assert times.steady_s == 1.1


@pytest.mark.parametrize(
    ("measured_s", "off"), [(1.24, False), (1.26, True), (0.76, False), (0.74, True)]
)
def test_a_quarter_more_or_less_is_off(measured_s: float, off: bool) -> None:
    assert is_off(1.0, measured_s) is off


def test_a_doubted_profile_is_measured_anew_once(
    device: EmulatedDevice, tmp_path: Path, measured: list[str]
) -> None:
    assert not doubt_profile(device, tmp_path), "there is none"
    profile(device, tmp_path)
    assert doubt_profile(device, tmp_path)
    assert doubt_profile(device, tmp_path), "the same run may end twice"
    measured.clear()
    again = profile(device, tmp_path)
    assert measured.count("machine") == 1
    assert len(measured) == 1 + len(again.times)
    measured.clear()
    # It was not the profile that was wrong, or it cannot be measured better.
    assert not doubt_profile(device, tmp_path)
    assert profile(device, tmp_path) == again
    assert measured == []


def test_after_its_days_a_profile_may_be_doubted_again(
    device: EmulatedDevice, tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    profile(device, tmp_path)
    assert doubt_profile(device, tmp_path)
    profile(device, tmp_path)
    path = ProfileCache(tmp_path, machine_key(device)).path
    data = json.loads(path.read_text())
    assert data["doubt"] == "settled"
    data["machine"]["measured_s"] -= 8 * 24 * 3600.0
    path.write_text(json.dumps(data))
    profile(device, tmp_path)
    assert doubt_profile(device, tmp_path)
    data["doubt"] = "perhaps"
    path.write_text(json.dumps(data))
    assert not ProfileCache(tmp_path, machine_key(device)).known


@pytest.mark.parametrize(
    ("step_s", "profile", "expected", "doubts"),
    [
        (1.1, True, "steps took 1.10 s, 10% more than the predicted 1.00 s", 0),
        (
            0.5, True,
            "steps took 500.0 ms, 50% less than the predicted 1.00 s; this machine is measured "
            "anew at the next start", 1,
        ),
        (2.0, False, "steps took 2.00 s, 100% more than the predicted 1.00 s", 0),
    ],
)  # fmt: skip
def test_one_line_tells_at_the_end(
    step_s: float, profile: bool, expected: str, doubts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []
    doubted: list[object] = []

    def doubt(device: object) -> bool:
        doubted.append(device)
        return True

    monkeypatch.setattr(plan_event, "doubt_profile", doubt)
    engine: Any = SimpleNamespace(
        plan=SimpleNamespace(step_s=1.0), device="card",
        planner=SimpleNamespace(options=SimpleNamespace(profile=profile)),
    )  # fmt: skip
    events: Any = SimpleNamespace(emit=lambda kind, **rest: told.append({"event": kind, **rest}))
    times = StepTimes()
    plan_event.tell_prediction(engine, times, events)
    assert told == [], "too few steps"
    for _ in range(profile_cache._SLOW_STEPS + profile_cache._LEAST_STEPS):
        times.note(step_s)
    plan_event.tell_prediction(engine, times, events)
    assert [event_line(event) for event in told] == [expected]
    assert len(doubted) == doubts
    assert event_line({"event": "prediction", "step_s": "long"}) is None
