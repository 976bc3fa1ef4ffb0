"""The benchmark `plan`: predictions beside measurements, case by case. No time is asserted."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from pathlib import Path
from typing import Any

import pytest

import atomtrain
from atombench import bench
from atombench.common import BenchmarkOptions
from atombench.engine import plan, plan_case
from atombench.engine.apart import BenchmarkError
from atombench.engine.plan import PlanSetup
from atombench.engine.plan_case import PlanCase
from atomtrain.engine.options import Options
from atomtrain.errors import ConfigError

TINY = PlanCase(
    layers=3, width=32, vocabulary=64, sequence_tokens=8, micro_batches=2, state_per_budget=2,
    link_bytes_per_s=1e9,
)  # fmt: skip


def test_a_case_is_predicted_and_measured() -> None:
    # So wide that memory grows by more than the system takes of the libraries' pages meanwhile.
    case = dataclasses.replace(TINY, width=512)
    setup = PlanSetup(cases=(case,), rounds=2, steps=2, warmup_steps=1, threads=1)
    result = plan.run(BenchmarkOptions(), setup)
    assert {"machine", "versions", "inputs", "cases"} <= set(result)
    (row,) = result["cases"]
    for name in ("step_s", "device_peak_bytes", "host_peak_bytes"):
        assert row[f"predicted_{name}"] > 0
        assert row[f"measured_{name}"] > 0
    assert row["measured_device_peak_bytes"] <= row["predicted_device_peak_bytes"]
    assert row["predicted_device_peak_bytes"] <= row["device_budget_bytes"]
    share = row["predicted_step_s"] / row["measured_step_s"] - 1
    assert row["step_error_share"] == pytest.approx(share)
    assert result["largest_step_error_share"] == pytest.approx(abs(share))
    assert [len(timed) for timed in row["steps_s"]] == [2, 2]
    timed = [step_s for timed in row["steps_s"] for step_s in timed]
    assert row["measured_step_s"] == statistics.median(timed)
    assert len(row["predictions_s"]) == 3
    assert len(set(row["predictions_s"])) == 3  # each from a profile of its own
    assert row["predicted_step_s"] == statistics.median(row["predictions_s"])
    json.dumps(result, allow_nan=False)


def test_memory_is_that_of_a_process_which_measures_no_profile(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    plan._trained(TINY, {"rounds": 1, "steps": 1, "warmup_steps": 1}, environment)
    (profile,) = tmp_path.rglob("profiles/*.json")
    found = json.loads(profile.read_text())
    found["machine"]["crowded_share"] = 1.0  # others would take it again now
    profile.write_text(json.dumps(found))
    before = profile.read_bytes()
    plan._trained(TINY, None, environment)
    assert profile.read_bytes() == before


def test_a_case_that_cannot_be_planned_says_so() -> None:
    impossible = dataclasses.replace(TINY, state_per_budget=1000.0)
    with pytest.raises(BenchmarkError, match="PlanError: no plan fits"):
        plan.run(BenchmarkOptions(), PlanSetup(cases=(impossible,), rounds=1, steps=1, threads=1))


@pytest.mark.parametrize("host_layers", [0, 1])
def test_the_device_is_idle_while_layers_on_the_host_run_backward(host_layers: int) -> None:
    case = dataclasses.replace(TINY, vocabulary=1024)
    options = Options(micro_batches=2, host_layers=host_layers, profile=False)
    with atomtrain.swap(
        plan_case._model(case),
        plan_case._step_data(case)[0],
        optimizer=plan_case._adamw,
        device="emulated",
        options=options,
    ) as engine:
        beside_bytes = plan_case._device_bytes_at_host_peak(engine)
        weights_bytes = host_layers * engine.planner.costs.layers[0].parameter_bytes
        assert engine.plan.host_layers == host_layers
        peak_bytes = engine.plan.device_peak_bytes
    assert peak_bytes - weights_bytes <= beside_bytes <= peak_bytes
    assert (beside_bytes < peak_bytes) == bool(host_layers)


def test_nonsense_is_refused() -> None:
    with pytest.raises(ConfigError, match="no cases"):
        PlanSetup(cases=())
    for name in ("rounds", "steps", "warmup_steps"):
        with pytest.raises(ConfigError, match=f"{name} must be at least 1"):
            PlanSetup(cases=(TINY,), **{name: 0})
    with pytest.raises(ConfigError, match="width must be at least 1"):
        PlanCase(layers=1, width=0)


def test_the_contract_has_its_dozen_cases() -> None:
    cases = plan.FULL.cases
    assert len(set(cases)) == len(cases) >= 12
    assert {case.tied for case in cases} == {True, False}
    assert len({case.link_bytes_per_s for case in cases}) >= 6
    assert len({case.width for case in cases}) >= 6
    assert len(plan.QUICK.cases) < len(cases)


def test_cases_can_be_chosen(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    run = []

    def row(case: PlanCase, *_: Any) -> dict[str, Any]:
        run.append(case)
        return {}

    monkeypatch.setattr(plan, "_run_case", row)
    monkeypatch.setattr(plan, "_sentence", lambda _: "")
    monkeypatch.setattr(plan, "_summary", lambda _: {})
    assert bench.run(["plan", "--case", "3", "--case", "14", "--json"]) == 0
    assert run == [plan.FULL.cases[2], plan.FULL.cases[13]]
    capsys.readouterr()
    for number in ("0", "15"):
        with pytest.raises(ConfigError, match=f"--case {number} does not exist; .* from 1 to 14"):
            bench.run(["plan", "--case", number])
