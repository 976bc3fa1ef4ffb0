"""Profiles: every kind of layer once, in training's own conditions, leaving no trace."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import atomtrain
from atomtrain.analysis import LayerTime, chain_of, layer_costs
from atomtrain.analysis.costs import profile
from atomtrain.analysis.costs.profile import (
    check_time,
    estimated_times,
    flops_per_s,
    layer_times,
    usual_s,
)
from atomtrain.analysis.costs.storages import StorageTracker
from atomtrain.analysis.layers.chain import Layer
from atomtrain.engine.api import measured_overhead
from atomtrain.engine.calibration import profiling
from atomtrain.engine.calibration.machines import (
    Overhead,
    assumed_machine,
    catalogue_gpu,
    measure_machine,
)
from atomtrain.engine.calibration.profiling import take_profile
from atomtrain.engine.devices.processor import EmulatedDevice
from atomtrain.errors import AnalysisError, ConfigError
from atomtrain.models import GPT, GPTConfig
from atomtrain.planning.catalogue import GPUS, gpu_reported_as

CPU = torch.device("cpu")
TOKENS = torch.zeros(2, 8, dtype=torch.long)
EXAMPLE = {"input_ids": TOKENS, "labels": TOKENS}


def small_gpt(layers: int = 3, dropout: float = 0.0) -> GPT:
    return GPT(
        GPTConfig(
            layers=layers, width=16, heads=2, head_width=8, vocabulary=31, context=8,
            dropout=dropout,
        )
    )  # fmt: skip


def parts(model: nn.Module, example: Any = EXAMPLE, loss: Any = None) -> tuple[Any, Any, Any]:
    traced = chain_of(model, example, loss)
    inputs = traced.bind(example)
    return traced.chain, layer_costs(traced.chain, inputs), inputs


def times_of(model: nn.Module, **options: Any) -> dict[str, LayerTime]:
    chain, costs, inputs = parts(model)
    return layer_times(chain, costs, inputs, CPU, lambda: None, **options)


def test_each_kind_of_layer_is_measured() -> None:
    chain, costs, inputs = parts(small_gpt())
    times = layer_times(chain, costs, inputs, CPU, lambda: None)
    assert set(times) == {cost.kind for cost in costs.layers}
    assert len(times) < len(chain.layers)
    for time in times.values():
        assert time.forward_s > 0
        assert time.backward_s > 0


def test_what_often_takes_longer_counts_as_often_and_a_hiccup_little() -> None:
    assert usual_s([0.01, 0.01, 0.01, 0.02]) == pytest.approx(0.0125)
    assert usual_s([0.01] * 9 + [60.0]) == pytest.approx(0.012)
    assert usual_s([0.0, 0.0]) == 0.0


def test_what_a_first_call_prepares_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's attention takes half a second for it, with a graph and once more without."""
    chain, costs, inputs = parts(small_gpt())
    run, prepared, now_s = Layer.run, set[Any](), 0.0

    def slow_at_first(layer: Layer, *given: Any) -> Any:
        nonlocal now_s
        way = layer.name, torch.is_grad_enabled()
        now_s += 0.001 if way in prepared else 0.5
        prepared.add(way)
        return run(layer, *given)

    monkeypatch.setattr(Layer, "run", slow_at_first)
    monkeypatch.setattr(profile, "PROFILE_S", 0.0)
    times = layer_times(chain, costs, inputs, CPU, lambda: None, clock=lambda: now_s)
    for seconds in times.values():
        assert seconds.known == pytest.approx([0.001, 0.001])


def test_short_layers_are_timed_more_than_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little time there is: a hiccup is known by what is usual."""
    monkeypatch.setattr(profile, "PROFILE_S", 0.0)
    for each_s, expected in ((0.02, 3), (0.2, 1)):
        clock = itertools.count(step=each_s)
        measured: list[LayerTime] = []
        monkeypatch.setattr(profile, "usual_s", lambda known, to=measured: to.append(known) or 0.1)
        times_of(small_gpt(), clock=lambda clock=clock: next(clock))
        assert {len(known) for known in measured} == {expected}


def test_only_the_kinds_asked_for_are_measured() -> None:
    _, costs, _ = parts(small_gpt())
    wanted = [costs.layers[0].kind]
    assert list(times_of(small_gpt(), kinds=wanted)) == wanted


def test_a_profile_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    chain, costs, inputs = parts(model, torch.ones(3, 4), lambda output: output.sum())
    layer_times(chain, costs, inputs, CPU, lambda: None)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_layers_run_in_the_given_context() -> None:
    entered = []

    class Watch(StorageTracker):
        def __enter__(self) -> Any:
            entered.append(self)
            return super().__enter__()

    times_of(small_gpt(), computing=Watch)
    assert entered
    assert all(tracker.peak_bytes > 0 for tracker in entered)


def test_layers_that_would_take_long_are_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    chain, costs, inputs = parts(small_gpt())
    monkeypatch.setattr("atomtrain.analysis.costs.profile.flops_per_s", lambda *_: 1.0)
    monkeypatch.setattr(
        "atomtrain.analysis.costs.profile._measure", lambda *_: pytest.fail("measured")
    )
    monkeypatch.setattr("atomtrain.analysis.costs.profile.LONGEST_S", 0.0)
    times = layer_times(chain, costs, inputs, CPU, lambda: None)
    assert times == estimated_times(costs, 1.0)


def test_the_profile_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    monkeypatch.setattr("atomtrain.analysis.costs.profile.PROFILE_S", -1.0)
    monkeypatch.setattr(
        "atomtrain.analysis.costs.profile._measure",
        lambda layer, *_: measured.append(layer.name) or LayerTime(1.0, 2.0),
    )
    times = times_of(small_gpt())
    assert len(measured) == len(times)


@pytest.mark.parametrize("nonsense", [float("nan"), float("inf"), -1.0])
def test_nonsense_is_an_error_that_names_the_layer(
    nonsense: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "atomtrain.analysis.costs.profile._measure", lambda *_: LayerTime(1.0, nonsense)
    )
    with pytest.raises(AnalysisError, match=r"layer 'embedding' takes (nan|inf|-1.0) s"):
        times_of(small_gpt())


def test_a_time_must_be_a_number() -> None:
    check_time(LayerTime(0.0, 1), "fine")
    with pytest.raises(AnalysisError, match="'bad' takes soon s"):
        check_time(LayerTime("soon", 1.0), "bad")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_rated_in_the_type_of_the_run(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, costs, inputs = parts(small_gpt().to(dtype))
    asked = []
    monkeypatch.setattr(
        "atomtrain.analysis.costs.profile.flops_per_s", lambda *given: asked.append(given[2]) or 1.0
    )
    monkeypatch.setattr("atomtrain.analysis.costs.profile.LONGEST_S", 0.0)
    layer_times(chain, costs, inputs, CPU, lambda: None)
    assert asked == [dtype]
    assert 0 < flops_per_s(CPU, lambda: None, dtype) < 1e16


def test_the_rate_of_products_is_a_rate() -> None:
    assert 0 < flops_per_s(CPU, lambda: None) < 1e16


@pytest.mark.slow
def test_a_measured_machine_has_every_rate(tmp_path: Path) -> None:
    device = EmulatedDevice(64 << 20, 1e9)
    try:
        machine = measure_machine(device, measured_overhead, tmp_path)
    finally:
        device.close()
    assert machine.device_memory_bytes == 64 << 20
    # The link is never faster than it was told to be.
    assert 0 < machine.load_bytes_per_s <= 1e9
    assert 0 < machine.unload_bytes_per_s <= 1e9
    assert machine.host_copy_bytes_per_s is not None
    assert machine.visit_s >= 0
    assert machine.compute_s_per_offloaded_storage >= 0
    # Ordinary memory is all that there is.
    assert machine.load_pageable_bytes_per_s is None
    assert not list(tmp_path.iterdir())


def no_overhead() -> Overhead:
    """Leave out the longest measurement."""
    return Overhead(0.0, 0.0)


@pytest.mark.slow
def test_measuring_a_small_device_behind_a_slow_link(tmp_path: Path) -> None:
    device = EmulatedDevice(1 << 10, 1e6)
    try:
        machine = measure_machine(device, no_overhead, tmp_path)
    finally:
        device.close()
    assert 0 < machine.load_bytes_per_s <= 1e6


@pytest.mark.slow
def test_streams_that_tests_disturb_are_not_measured(tmp_path: Path) -> None:
    def disturb(stream: str) -> None:
        pytest.fail(f"a job ran on {stream}")

    device = EmulatedDevice(1 << 20, 1e9, disturb)
    try:
        measure_machine(device, no_overhead, tmp_path)
    finally:
        device.close()


@pytest.mark.slow
def test_storage_that_cannot_be_measured_is_unknown(tmp_path: Path) -> None:
    device = EmulatedDevice(1 << 20, 1e9)
    try:
        machine = measure_machine(device, no_overhead, tmp_path / "nowhere")
    finally:
        device.close()
    assert machine.storage_read_bytes_per_s is None
    assert machine.storage_write_bytes_per_s is None


def test_without_a_profile_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("measure_machine", "layer_times"):
        monkeypatch.setattr(profiling, name, lambda *_, **__: pytest.fail("measured"))
    device = EmulatedDevice(1 << 20, 3e9)
    try:
        taken = take_profile(device, *parts(small_gpt()), no_overhead, measure=False)
    finally:
        device.close()
    assert taken.machine.load_bytes_per_s == 3e9
    assert all(0 < time.forward_s < time.backward_s for time in taken.times.values())


def test_an_engine_goes_without_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "measure_machine", lambda *_: pytest.fail("measured"))
    with atomtrain.swap(
        small_gpt(),
        EXAMPLE,
        optimizer=torch.optim.AdamW,
        device="emulated:100GB/s",
        options=atomtrain.Options(profile=False),
    ) as engine:
        assert engine.step([EXAMPLE]) > 0


class _Card:
    """A GPU by name only."""

    memory_bytes, reserved_bytes = 8 << 30, 0
    torch_device = torch.device("cuda")

    def __init__(self, name: str) -> None:
        self.name = name


def test_a_gpu_is_found_by_what_its_driver_calls_it() -> None:
    assert gpu_reported_as("NVIDIA GeForce RTX 3090") is GPUS["rtx-3090"]
    assert gpu_reported_as("NVIDIA GeForce RTX 3090 Ti") is None
    assert gpu_reported_as("NVIDIA H100 80GB HBM3") is GPUS["h100"]
    machine = assumed_machine(_Card("NVIDIA A100-SXM4-80GB"))  # type: ignore[arg-type]
    assert machine.device_memory_bytes == 8 << 30
    assert machine.name.startswith("A100 80 GB")
    with pytest.raises(ConfigError, match=r"'Voodoo2' is not in the catalogue.*--no-profile"):
        catalogue_gpu(_Card("Voodoo2"))  # type: ignore[arg-type]
