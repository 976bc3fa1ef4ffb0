"""What visits and offloading cost is measured on a model that nothing writes meanwhile."""

from __future__ import annotations

import time
from typing import Any

import pytest

from atomtrain.engine.api import measured_overhead
from atomtrain.engine.calibration import machines
from atomtrain.engine.calibration.machines import Overhead, Sample, overhead_of
from atomtrain.engine.engine import Engine


def test_layers_are_timed_when_the_last_updates_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates write the parameters in the background, and backward refuses what was written."""
    calls: list[str] = []
    samples: list[Sample] = []
    step, synchronize, layer_times = Engine.step, Engine.synchronize, machines.layer_times

    def seen(name: str, call: Any) -> Any:
        def calling(*arguments: Any, **named: Any) -> Any:
            result = call(*arguments, **named)
            calls.append(name)
            return result

        return calling

    def explained(*given: Sample) -> Overhead:
        samples.extend(given)
        return overhead_of(*given)

    monkeypatch.setattr(Engine, "step", seen("step", step))
    monkeypatch.setattr(Engine, "synchronize", seen("synchronize", synchronize))
    monkeypatch.setattr(machines, "layer_times", seen("layer_times", layer_times))
    monkeypatch.setattr(machines, "overhead_of", explained)
    monkeypatch.setattr(machines, "_TRIAL_STEPS", 1)
    spent = measured_overhead()
    assert all(seconds >= 0 for seconds in spent)
    timed = [at for at, name in enumerate(calls) if name == "layer_times"]
    assert len(timed) == 2
    for at in timed:
        assert calls[at - 2 : at] == ["step", "synchronize"]
    recomputed, offloaded = samples
    assert recomputed.storages == 0
    # In all layers but the turn's, at least what norms and the activation function read.
    assert offloaded.storages >= (machines._TRIAL_LAYERS - 1) * 3
    assert offloaded.visits == recomputed.visits == 2 * machines._TRIAL_LAYERS - 1


def test_what_a_step_waits_is_no_overhead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads wake late on a busy machine; waits of real steps are in the plan's timeline."""
    wait_s, step = 0.4, Engine.step

    def waiting(*arguments: Any, **named: Any) -> Any:
        time.sleep(wait_s)
        return step(*arguments, **named)

    monkeypatch.setattr(Engine, "step", waiting)
    monkeypatch.setattr(machines, "_TRIAL_STEPS", 1)
    waited_s = wait_s / machines._TRIAL_MICRO_BATCHES / (2 * machines._TRIAL_LAYERS - 1)
    assert measured_overhead().visit_s < waited_s / 2


def test_overhead_is_what_layers_do_not_explain() -> None:
    recomputed = Sample(step_s=1.0, layers_s=0.4, visits=6, storages=0)
    offloaded = Sample(step_s=1.3, layers_s=0.3, visits=6, storages=10)
    spent = overhead_of(recomputed, offloaded)
    assert spent.visit_s == pytest.approx(0.1)
    assert spent.offloaded_storage_s == pytest.approx(0.02)  # there and back


def test_overhead_is_never_negative() -> None:
    fast = Sample(step_s=0.1, layers_s=0.4, visits=6, storages=10)
    assert overhead_of(fast, fast) == Overhead(0.0, 0.0)
