"""The benchmark of optimizers: the contract's keys and the bytes that it assumes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from atombench import benchmark
from atombench.common import BenchmarkOptions
from atombench.engine.optimizer import _CANDIDATES, OptimizerSetup, run
from atomtrain.errors import ConfigError


def test_the_result_has_the_contracts_keys() -> None:
    setup = OptimizerSetup(matrices=2, rows=16, columns=64, rounds=2)
    result = run(BenchmarkOptions(quick=True), setup)
    assert result == json.loads(json.dumps(result, allow_nan=False))
    assert {"parameters_per_s", "copy_bytes_per_s", "share_of_copy_bound"} <= set(result)
    assert {"machine", "versions", "inputs", "threads"} <= set(result)
    assert result["parameters"] == 2048
    rows: dict[str, dict[str, Any]] = result["optimizers"]
    assert set(rows) == set(_CANDIDATES)
    for row in rows.values():
        assert min(value for key, value in row.items() if key != "path") > 0
        assert row["parameters_per_s"] == pytest.approx(row["parameters"] / row["step_s"])
    assert [name for name, row in rows.items() if row["parameters"] < 2048] == ["muon"]
    assert [name for name, row in rows.items() if "share_of_products" in row] == ["muon"]
    assert rows["torch-adamw-fused"]["share_of_fused"] == 1
    clipped = [name for name, row in rows.items() if "clipped_over_unclipped" in row]
    assert clipped == [name for name in rows if name.endswith("-clipped")]
    assert {name for name, row in rows.items() if row["path"] == "compiled"} == {
        name
        for name in rows
        if name in clipped or name.startswith("bf16-") or name in ("adamw-bfloat16", "adamw-int8")
    }
    assert result["share_of_copy_bound"] == rows["adamw"]["share_of_copy_bound"]


@pytest.mark.parametrize("name", _CANDIDATES)
def test_the_bytes_of_the_state_are_those_of_the_real_one(name: str) -> None:
    dtype = _CANDIDATES[name].dtype
    parameter = nn.Parameter(torch.randn(16, 64).to(dtype))
    parameter.grad = torch.randn(16, 64).to(dtype)
    optimizer = _CANDIDATES[name].make([parameter])
    optimizer.step()
    state = optimizer.state[parameter]
    kept = sum(v.nbytes for k, v in state.items() if k != "step")
    assert kept == _CANDIDATES[name].state_bytes * 1024


def test_some_can_be_left_out() -> None:
    but = ("muon", "torch-adamw-foreach")
    setup = OptimizerSetup(matrices=1, rows=16, columns=64, rounds=1, but=but)
    rows = run(BenchmarkOptions(quick=True), setup)["optimizers"]
    assert set(rows) == set(_CANDIDATES) - set(but)


def test_it_is_registered() -> None:
    assert benchmark("optimizer").module == "atombench.engine.optimizer"


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="rounds must be at least 1, not 0"):
        OptimizerSetup(rounds=0)
