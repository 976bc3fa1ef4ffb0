"""Machines: refused when they make no sense, kept in files that people can write."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from atomtrain.errors import ConfigError, PlanError
from atomtrain.planning.catalogue import machine_for
from atomtrain.planning.plan.machine import Machine, load_machine, save_machine

LEAST: dict[str, Any] = {
    "name": "mine",
    "load_bytes_per_s": 1e9,
    "unload_bytes_per_s": 2e9,
    "update_parameters_per_s": 1e8,
    "device_memory_bytes": 1 << 30,
    "host_memory_bytes": 1 << 34,
}
NUMBERS = [field.name for field in dataclasses.fields(Machine) if field.name != "name"]


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), 10**400, "many", True])
def test_nonsense_is_refused_and_named(field: str, value: object) -> None:
    with pytest.raises(PlanError, match=field):
        Machine(**{**LEAST, field: value})


def test_nothing_is_refused_where_something_is_needed() -> None:
    for field in NUMBERS:
        if field.startswith("compute_s_per_") or field in ("visit_s", "copy_s"):
            assert getattr(Machine(**{**LEAST, field: 0.0}), field) == 0.0
        else:
            with pytest.raises(PlanError, match=f"{field} is 0"):
                Machine(**{**LEAST, field: 0})
    with pytest.raises(PlanError, match="at most 1"):
        Machine(**LEAST, both_ways_share=1.5)


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    for machine in (Machine(**LEAST), machine_for("h100", 1 << 40)):
        path = tmp_path / "machine.json"
        save_machine(machine, path)
        assert load_machine(path) == machine
        assert [file.name for file in tmp_path.iterdir()] == ["machine.json"]


def test_people_may_write_units(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    text = {**LEAST, "load_bytes_per_s": "12GB/s", "device_memory_bytes": "24GiB"}
    path.write_text(json.dumps(text))
    machine = load_machine(path)
    assert machine.load_bytes_per_s == 12e9
    assert machine.device_memory_bytes == 24 << 30


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"load_byte_per_s": 1}, r"unknown key 'load_byte_per_s'. Did you mean 'load_bytes_per_s'"),
        ({"load_bytes_per_s": "fast"}, "not a rate"),
        ({"host_memory_bytes": "much"}, "not a size"),
        ({"host_memory_bytes": [1]}, "must be a number"),
        ({"update_parameters_per_s": "1e9"}, "must be a number"),
        ({"name": 3}, "name must be text"),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({**LEAST, **change}))
    with pytest.raises(ConfigError, match=complaint):
        load_machine(path)


def test_a_negative_or_endless_rate_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    for value in (-1, float("nan"), float("inf")):
        path.write_text(json.dumps({**LEAST, "load_bytes_per_s": value}))
        with pytest.raises(PlanError, match="load_bytes_per_s"):
            load_machine(path)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the machine file"):
        load_machine(tmp_path / "nowhere.json")
    path = tmp_path / "machine.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        load_machine(path)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="must be a JSON object"):
        load_machine(path)
    path.write_text(json.dumps({"name": "x"}))
    with pytest.raises(ConfigError, match="lacks 'load_bytes_per_s'"):
        load_machine(path)


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write the machine file"):
        save_machine(Machine(**LEAST), tmp_path / "no" / "folder" / "machine.json")
