"""The cache of profiles: what was measured once is not measured again; damage costs a warning."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atomtrain.analysis import LayerTime
from atomtrain.engine.api import measured_overhead
from atomtrain.engine.calibration import profile_cache, profiling
from atomtrain.engine.calibration.profile_cache import (
    ProfileCache,
    layer_key,
    machine_key,
    profile_folder,
)
from atomtrain.engine.calibration.profiling import Profile, profiled_machine, take_profile
from atomtrain.engine.devices.processor import EmulatedDevice
from atomtrain.engine.options import Options
from atomtrain.errors import ConfigError
from atomtrain.planning.plan.machine import Machine
from tests.support.waiting import PATIENCE_S
from tests.unit.analysis.test_profile import EXAMPLE, parts, small_gpt

MACHINE = Machine(
    name="emulated",
    load_bytes_per_s=1e9,
    unload_bytes_per_s=2e9,
    update_parameters_per_s=1e8,
    device_memory_bytes=5,
    host_memory_bytes=6,
)
KEY = {"device": "x"}


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    opened = EmulatedDevice(1 << 24, 1e9)
    yield opened
    opened.close()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace measurements by figures; the list says what was measured."""
    log: list[str] = []

    def machine(*_: Any) -> Machine:
        log.append("machine")
        return MACHINE

    def times(chain: Any, costs: Any, *_: Any, kinds: Any, **__: Any) -> dict[str, LayerTime]:
        log.extend(kinds)
        return {kind: LayerTime(1.0 + len(log), 2.0) for kind in kinds}

    monkeypatch.setattr(profiling, "host_memory_bytes", lambda: 6)  # what is free changes
    monkeypatch.setattr(profiling, "measure_machine", machine)
    monkeypatch.setattr(profiling, "layer_times", times)
    return log


def profile(device: EmulatedDevice, folder: Path, layers: int = 2) -> Profile:
    return take_profile(device, *parts(small_gpt(layers)), measured_overhead, folder=folder)


def test_the_second_time_nothing_is_measured(
    device: EmulatedDevice, tmp_path: Path, measured: list[str]
) -> None:
    first = profile(device, tmp_path)
    assert measured.count("machine") == 1
    assert len(measured) == 1 + len(first.times)
    measured.clear()
    assert profile(device, tmp_path) == first
    # Other numbers of the same layers are known as well.
    assert profile(device, tmp_path, layers=5).times.keys() == first.times.keys()
    assert measured == []


def test_budgets_are_those_of_now(
    device: EmulatedDevice, tmp_path: Path, measured: list[str]
) -> None:
    assert profile(device, tmp_path).machine.device_memory_bytes == 1 << 24
    other = EmulatedDevice(1 << 20, 1e9)
    try:
        assert profile(other, tmp_path).machine.device_memory_bytes == 1 << 20
    finally:
        other.close()
    assert measured.count("machine") == 1


def test_another_link_or_number_of_threads_is_another_machine(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = machine_key(device)
    slower = EmulatedDevice(1 << 24, 1e8)
    try:
        assert machine_key(slower) != key
    finally:
        slower.close()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert machine_key(device) != key


def test_updates_by_another_core_or_by_none_are_measured_anew(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = machine_key(device)
    with monkeypatch.context() as patched:
        patched.setattr(profile_cache, "core", lambda: None)
        assert machine_key(device) != key
    monkeypatch.setattr(profile_cache, "fingerprint", lambda: "another")
    assert machine_key(device) != key


def test_layers_that_compute_alike_have_one_key() -> None:
    chain, costs, _ = parts(small_gpt(4))
    keys = [
        layer_key(layer, cost, costs.values)
        for layer, cost in zip(chain.layers, costs.layers, strict=True)
    ]
    assert len(set(keys)) == len({cost.kind for cost in costs.layers})
    again, costs_again, _ = parts(small_gpt(4))
    assert keys[1] == layer_key(again.layers[1], costs_again.layers[1], costs_again.values)


def test_shapes_and_dropout_make_another_layer() -> None:
    def block_key(model: Any, example: Any = EXAMPLE) -> str:
        chain, costs, _ = parts(model, example)
        return layer_key(chain.layers[1], costs.layers[1], costs.values)

    tokens = torch.zeros(2, 4, dtype=torch.long)
    keys = {
        block_key(small_gpt()),
        block_key(small_gpt(dropout=0.1)),
        block_key(small_gpt(), {"input_ids": tokens, "labels": tokens}),
    }
    assert len(keys) == 3


def filled(folder: Path) -> ProfileCache:
    cache = ProfileCache(folder, KEY)
    cache.put_machine(MACHINE)
    cache.put_time("a", LayerTime(1.0, 2.0))
    cache.put_update("u", 2.5)
    cache.save()
    return cache


def test_what_is_saved_is_read_again(tmp_path: Path) -> None:
    filled(tmp_path)
    again = ProfileCache(tmp_path, KEY)
    assert again.machine(5, 6) == MACHINE
    assert again.time("a") == LayerTime(1.0, 2.0)
    assert again.time("b") is None
    assert again.update("u") == 2.5
    assert again.update("v") is None


def test_what_offloading_takes_is_kept(tmp_path: Path) -> None:
    time = LayerTime(1.0, 2.0, 0.25, 0.5, 0.125, 0.375)
    cache = filled(tmp_path)
    cache.put_time("a", time)
    cache.save()
    assert ProfileCache(tmp_path, KEY).time("a") == time


def change(data: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split("/")
    for name in parents:
        data = data[name]
    data[last] = value


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[]",
        "null",
        "\x00\xff",
        '{"version": 1}',
        ("version", 99),
        ("key/device", "y"),
        ("layers/a/forward_s", float("nan")),
        ("layers/a/backward_s", -1.0),
        ("layers/a/backward_s", "soon"),
        ("layers/a/measured_s", "never"),
        ("layers/a", None),
        ("layers", []),
        ("updates", []),
        ("layers/a/crowded_share", 1.5),
        ("machine/crowded_share", None),
        ("updates/u/share", float("nan")),
        ("updates/u/share", -1.0),
        ("machine/load_bytes_per_s", float("inf")),
        ("machine/update_parameters_per_s", -1),
        ("machine/speed", 1),
        ("machine", {"measured_s": 1.0}),
    ],
)
def test_damage_is_passed_over_and_replaced(
    tmp_path: Path, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = filled(tmp_path).path
    if isinstance(damage, tuple):
        data = json.loads(path.read_text())
        change(data, *damage)
        damage = json.dumps(data)
    path.write_text(damage, encoding="latin-1")
    with caplog.at_level(logging.WARNING):
        cache = ProfileCache(tmp_path, KEY)
    assert str(path) in caplog.text
    assert cache.machine(5, 6) is None
    assert cache.time("a") is None
    assert cache.update("u") is None
    caplog.clear()
    filled(tmp_path)
    assert ProfileCache(tmp_path, KEY).machine(5, 6) == MACHINE


def test_damage_is_measured_again(
    device: EmulatedDevice, tmp_path: Path, measured: list[str]
) -> None:
    profile(device, tmp_path)
    (path,) = tmp_path.glob("*.json")
    path.write_text("{")
    measured.clear()
    profile(device, tmp_path)
    assert "machine" in measured
    assert json.loads(path.read_text())["version"] == profile_cache.VERSION


def test_old_measurements_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path)
    now_s = profile_cache.time.time()
    for later_s, known in ((0.5 * profile_cache.KEPT_S, True), (2 * profile_cache.KEPT_S, False)):
        monkeypatch.setattr(profile_cache.time, "time", lambda later_s=later_s: now_s + later_s)
        cache = ProfileCache(tmp_path, KEY)
        assert (cache.machine(5, 6) is not None) is known
        assert (cache.time("a") is not None) is known


def test_the_file_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_cache, "_MOST_ENTRIES", 3)
    cache = filled(tmp_path)
    for name in "bcde":
        cache.put_time(name, LayerTime(1.0, 1.0))
    cache.save()
    again = ProfileCache(tmp_path, KEY)
    assert [name for name in "abcde" if again.time(name)] == ["c", "d", "e"]


def test_a_folder_that_cannot_be_made_costs_a_warning(
    device: EmulatedDevice, tmp_path: Path, measured: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        taken = profile(device, tmp_path / "file" / "profiles")
    assert "cannot be kept" in caplog.text
    assert taken.machine.load_bytes_per_s == MACHINE.load_bytes_per_s


def test_nothing_but_the_profile_and_its_lock_is_left(
    device: EmulatedDevice, tmp_path: Path, measured: list[str]
) -> None:
    profile(device, tmp_path)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".lock"]


def test_the_folder_follows_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert profile_folder() == Path("/somewhere/atomtrain/profiles")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert profile_folder() == Path.home() / ".cache" / "atomtrain" / "profiles"


def _measure_in_turn(folder: str, log: str) -> None:
    cache = ProfileCache(Path(folder), KEY)
    with cache.turn():
        cache.reload()
        if cache.machine(5, 6) is None:
            with Path(log).open("a") as file:
                file.write(f"{os.getpid()}\n")
            cache.put_machine(MACHINE)
            cache.save()


def test_of_processes_that_start_together_one_measures(tmp_path: Path) -> None:
    log = tmp_path / "log"
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_measure_in_turn, args=(str(tmp_path), str(log))) for _ in range(6)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE_S)
        assert process.exitcode == 0
    assert len(log.read_text().splitlines()) == 1
    assert ProfileCache(tmp_path, KEY).machine(5, 6) == MACHINE


class Crowd:
    """What the processor seems to be: `then` while measuring, `now` when asked."""

    then = 0.0
    now = 0.0


@pytest.fixture
def crowd(monkeypatch: pytest.MonkeyPatch) -> Crowd:
    state = Crowd()
    watch = SimpleNamespace(crowded_share=lambda: state.then)
    monkeypatch.setattr(profiling, "Watch", lambda: watch)
    monkeypatch.setattr(profiling, "crowded_now", lambda: state.now)
    return state


def test_it_is_measured_again_when_the_others_are_gone(
    device: EmulatedDevice,
    tmp_path: Path,
    measured: list[str],
    crowd: Crowd,
) -> None:
    crowd.then, crowd.now = 0.5, 0.5
    first = profile(device, tmp_path)
    assert first.crowded_share == 0.5
    taken = list(measured)
    assert profile(device, tmp_path) == first
    assert measured == taken, "no use in measuring again beside the same others"
    crowd.then, crowd.now = 0.05, 0.0
    again = profile(device, tmp_path)
    assert measured == 2 * taken
    assert again.crowded_share == 0.05
    assert profile(device, tmp_path) == again
    assert measured == 2 * taken


def test_only_what_was_crowded_is_measured_again(
    device: EmulatedDevice,
    tmp_path: Path,
    measured: list[str],
    crowd: Crowd,
) -> None:
    first = profile(device, tmp_path)
    (path,) = tmp_path.glob("*.json")
    data = json.loads(path.read_text())
    next(iter(data["layers"].values()))["crowded_share"] = 0.9
    path.write_text(json.dumps(data))
    measured.clear()
    assert len(profile(device, tmp_path).times) == len(first.times)
    assert len(measured) == 1
    assert "machine" not in measured


def test_everything_is_measured_again_on_demand(
    device: EmulatedDevice,
    tmp_path: Path,
    measured: list[str],
) -> None:
    profile(device, tmp_path)
    taken = list(measured)
    take_profile(device, *parts(small_gpt(2)), measured_overhead, measure="again", folder=tmp_path)
    assert measured == 2 * taken
    profiled_machine(device, measured_overhead, tmp_path)
    assert measured == 2 * taken
    profiled_machine(device, measured_overhead, tmp_path, again=True)
    assert measured == [*taken, *taken, "machine"]
    with pytest.raises(ConfigError, match="'again'"):
        Options(profile="anew")  # type: ignore[arg-type]
