"""When an engine follows the plan that a training had before, and why it does not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import atomtrain
from atomtrain.engine.devices.processor import EmulatedDevice
from atomtrain.engine.planner import Planner
from atomtrain.errors import PlanError
from tests.support.engine_models import adamw, gpt

pytestmark = pytest.mark.usefixtures("assumed_times")
MEMORY = "500KiB"
TOKENS = torch.zeros(2, 16, dtype=torch.long)


def swap(
    plan: Any = None, memory: Any = MEMORY, device: Any = "emulated:1GiB/s", layers: int = 4,
    rows: int = 2, **options: Any,
) -> atomtrain.Engine:  # fmt: skip
    example = {"input_ids": TOKENS[:rows], "labels": TOKENS[:rows]}
    options = {"micro_batches": 2, "plan": plan, **options}
    return atomtrain.swap(
        gpt(layers), example, optimizer=adamw, device=device, device_memory=memory,
        options=atomtrain.Options(**options),
    )  # fmt: skip


@pytest.fixture(scope="module")
def _plans() -> dict[str, Any]:
    return {}


@pytest.fixture
def before(_plans: dict[str, Any], assumed_times: None) -> dict[str, Any]:
    """Return what an engine keeps of its plan, through JSON."""
    if not _plans:
        with swap() as engine:
            assert engine.planner.before == ""
            assert engine.plan.segments > 1
            _plans.update(engine.kept_plan())
    found: dict[str, Any] = json.loads(json.dumps(_plans))
    return found


@pytest.fixture
def no_search(before: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def plan(*_: Any) -> None:
        raise AssertionError("it searches")

    with monkeypatch.context() as patch:
        patch.setattr(Planner, "plan", plan)
        yield


def said(**given: Any) -> str:
    with swap(**given) as engine:
        return engine.planner.before


@pytest.mark.usefixtures("no_search")
def test_the_same_plan_is_followed_without_a_search(before: Any) -> None:
    with swap(before) as engine:
        assert engine.planner.before == "as before"
        assert engine.kept_plan() == before
        batch = {"input_ids": TOKENS, "labels": TOKENS}
        engine.step([batch, batch])
        assert engine.device.peak_bytes() <= engine.plan.device_peak_bytes


@pytest.mark.usefixtures("no_search")
def test_a_plan_that_the_search_would_not_choose_is_followed_all_the_same(before: Any) -> None:
    with swap(before) as engine:
        wanted = dataclasses.replace(engine.plan, boundary="host")
    before["shape"]["boundary"] = "host"
    with swap(before) as engine:
        assert engine.plan.shape == wanted.shape
        assert engine.planner.before == "as before"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"memory": "600KiB"}, "device memory was 500.0 KiB (512000 bytes), now it is 600.0 KiB "),
        ({"micro_batches": 3}, "micro batches was 2, now it is 3"),
        ({"segments": 3}, "segments was not given, now it is 3"),
        ({"host_memory": "4GiB"}, "host memory was not given, now it is 4.0 GiB "),
        ({"clip_norm": 1.0}, "clips was False, now it is True"),
        ({"activations": "recompute"}, "activations was not given, now it is recompute"),
        ({"optimizer_on_device": False}, "device blocks was not given, now it is []"),
        ({"spend_gradients": True}, "spends was False, now it is True"),
        ({"device": "emulated:2GiB/s"}, "link was "),
        ({"device": "cpu"}, "device was emulated, now it is cpu"),
        ({"device": ["emulated:1GiB/s"] * 2, "micro_batches": 4}, "devices was 1, now it is 2"),
        ({"layers": 3}, "layers or micro-batches are others now"),
        ({"rows": 1}, "layers or micro-batches are others now"),
        ({"profile": "again"}, "everything is measured again"),
    ],
)
def test_who_asks_for_something_else_gets_a_new_plan(
    before: Any, given: dict[str, Any], why: str
) -> None:
    assert said(plan=before, **given).startswith(f"anew: {why}")


@pytest.mark.slow
def test_a_budget_that_nobody_gave_may_change_as_long_as_the_plan_fits(before: Any) -> None:
    def found(n_bytes: int, plan: Any) -> atomtrain.Engine:
        return swap(plan, None, EmulatedDevice(n_bytes, 2**30))

    with found(1 << 19, None) as engine:
        plan, peak_bytes = engine.kept_plan(), engine.plan.device_peak_bytes
        assert engine.plan.segments > 1
    with found(peak_bytes, plan) as engine:
        assert engine.planner.before == "as before"
        assert engine.kept_plan() == plan
    with found(peak_bytes - 1, plan) as engine:
        assert engine.planner.before.startswith("anew: the one before takes ")
        assert engine.planner.before.endswith("are there")
        assert "device memory" in engine.planner.before
        assert engine.plan.device_peak_bytes < peak_bytes


@pytest.mark.slow
def test_host_memory_that_is_less_now_makes_a_new_plan(
    before: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with swap(before) as engine:
        needed = engine.plan.host_bytes
    from atomtrain.engine import api

    there = api._machine_with_disk
    monkeypatch.setattr(
        api,
        "_machine_with_disk",
        lambda *given: dataclasses.replace(there(*given), host_memory_bytes=needed - 1),
    )
    with pytest.raises(PlanError, match="of host memory"):  # others take as much
        swap(before)


@pytest.mark.slow
def test_more_micro_batches_than_at_first_stay(before: Any) -> None:
    batch = {"input_ids": TOKENS, "labels": TOKENS}
    with swap(before) as engine:
        engine.step([batch] * 5)
        assert engine.plan.micro_batches == 5
        kept = engine.kept_plan()
    with swap(kept) as engine:
        assert engine.planner.before == "as before"
        assert engine.plan.micro_batches == 5
        assert engine.kept_plan() == kept


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"),
    [("slots", 3), ("resident_blocks", [2]), ("backward_bounds", [1, 2, 99])],
)
def test_a_plan_that_this_model_cannot_have_is_not_run(before: Any, name: str, value: Any) -> None:
    before["shape"][name] = value
    if name == "backward_bounds":
        before["shape"] |= {"forward_bounds": value[:2], "activations": []}
    if name == "resident_blocks":
        before["shape"]["device_blocks"] = []
    assert said(plan=before) == "anew: this model has no plan like the one before"


def test_fewer_micro_batches_than_asked_for_are_not_enough(before: Any) -> None:
    before["micro_batches"] = 1
    assert said(plan=before) == "anew: this model has no plan like the one before"


@pytest.mark.parametrize("value", ["a\nb" * 50, {"x": [1] * 1000}, 10**40, None])
def test_whatever_it_was_made_for_is_told_in_a_line(before: Any, value: Any) -> None:
    before["made_for"]["device memory"] = value
    (line,) = said(plan=before).splitlines()
    assert line.startswith("anew: device memory was ")
    assert len(line) < 200


def test_what_is_not_a_plan_is_refused_before_anything_is_done(before: Any) -> None:
    before["shape"]["slots"] = "two"
    with pytest.raises(PlanError, match="slots of a kept plan is 'two'"):
        atomtrain.Options(plan=before)
