"""What offloading takes is measured on real layers, by way of the engine's own graphs."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from atomtrain.analysis import LayerTime
from atomtrain.analysis.costs.profile import LONGEST_S
from atomtrain.engine.calibration import offload_times
from atomtrain.engine.calibration.offload_times import with_offloading
from atomtrain.engine.calibration.profiling import measured_times
from atomtrain.engine.devices.processor import EmulatedDevice
from atomtrain.engine.execution.offload import Parcel
from atomtrain.engine.execution.program_runs import OffloadedRun
from atomtrain.engine.execution.saved_script import Performance
from atomtrain.engine.planner import times_of_all
from tests.unit.analysis.test_profile import parts, small_gpt

pytestmark = pytest.mark.slow

FAST = LayerTime(1e-3, 3e-3)


def measured(base: LayerTime = FAST) -> tuple[Any, dict[str, LayerTime]]:
    chain, costs, inputs = parts(small_gpt(3))
    times = {cost.kind: base for cost in costs.layers}
    before = [p.detach().clone() for p in chain.parameters]
    found = with_offloading(times, chain, costs, inputs)
    for parameter, value in zip(chain.parameters, before, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.grad is None
    return costs, found


def test_layers_that_may_be_offloaded_are_measured() -> None:
    costs, times = measured()
    able = {cost.kind for cost in costs.layers[:-1] if cost.saved.movable}
    assert able < set(times)
    for kind, found in times.items():
        assert found[:2] == FAST[:2]
        assert len(found.known) == (6 if kind in able else 2)
        assert all(seconds >= 0 for seconds in found.known)


def test_what_takes_longer_on_the_way_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processor time: waits are in the plan's timeline."""
    unpack, spent_s, slept_s = Parcel.unpack, 2e-3, 50e-3

    def slow(pack: Callable[..., Any]) -> Callable[..., Any]:
        def slow_pack(*arguments: Any) -> Any:
            busy_for(spent_s)
            return pack(*arguments)

        return slow_pack

    def slow_unpack(*arguments: Any) -> Any:
        time.sleep(slept_s)
        return unpack(*arguments)

    monkeypatch.setattr(offload_times, "_MOST_S", 0.0)
    monkeypatch.setattr(Parcel, "pack", slow(Parcel.pack))
    monkeypatch.setattr(Performance, "pack", slow(Performance.pack))
    monkeypatch.setattr(Parcel, "unpack", slow_unpack)
    costs, times = measured()
    block = max(costs.layers[:-1], key=lambda cost: cost.saved.sent)
    found = times[block.kind]
    assert found.offload_forward_s is not None
    assert found.offload_backward_s is not None
    assert found.offload_forward_s > spent_s * block.saved.sent
    assert found.offload_backward_s < slept_s * block.saved.sent
    # More storages go where nothing is made again.
    assert block.all_sent is not None
    assert found.send_forward_s is not None
    assert found.send_backward_s is not None
    assert found.send_forward_s > spent_s * block.all_sent.sent > spent_s * block.saved.sent
    assert found.send_backward_s < slept_s * block.all_sent.sent


class Exported(nn.Module):
    """Has code of its own between its blocks, so its layers are runs of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)) for _ in range(4)
        )

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.first(value)
        for block in self.blocks:
            value = value + block(value)
        return value


def test_layers_that_run_by_programs_are_timed_so(monkeypatch: pytest.MonkeyPatch) -> None:
    send, spent_s, made_again = OffloadedRun.send, 2e-3, list[str]()

    def slow_send(*arguments: Any) -> None:
        busy_for(spent_s)
        send(*arguments)

    def noted(timer: Any, operation: Callable[..., Any]) -> Callable[..., Any]:
        made_again.append(operation.__name__)
        return operation

    monkeypatch.setattr(offload_times, "_MOST_S", 0.0)
    monkeypatch.setattr(offload_times._Timer, "of", noted)
    monkeypatch.setattr(OffloadedRun, "send", slow_send)
    chain, costs, inputs = parts(Exported(), torch.ones(3, 16), torch.sum)
    found = with_offloading({cost.kind: FAST for cost in costs.layers}, chain, costs, inputs)
    sent_s = [times.offload_forward_s or 0.0 for times in found.values()]
    assert max(sent_s) > spent_s
    assert "gelu" in made_again


def test_a_slow_run_of_the_layer_does_not_count_for_one_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two runs of a layer one takes longer than the other by more than offloading takes."""
    run, slower_s = offload_times._Bench._run, 20e-3
    calls = 0

    def uneven(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:  # plain, made again, sent
            busy_for(slower_s)
        return run(*arguments)

    monkeypatch.setattr(offload_times, "_MOST_S", 0.0)
    monkeypatch.setattr(offload_times._Bench, "_run", uneven)
    costs, times = measured()
    assert calls == (1 + 3) * 3 * sum(len(found.known) == 6 for found in times.values())
    block = max(costs.layers[:-1], key=lambda cost: cost.saved.sent)
    _, _, again_forward_s, again_s, sent_forward_s, sent_s = times[block.kind].known
    assert sent_forward_s + sent_s < again_forward_s + again_s + slower_s / 2
    assert again_s > slower_s / 4  # the layer's own time counts for both: half of it


def busy_for(seconds: float) -> None:
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


def test_layers_that_take_long_are_not_measured() -> None:
    _, times = measured(LayerTime(LONGEST_S, LONGEST_S))
    assert all(found.offload_forward_s is None for found in times.values())


def test_copies_of_one_kind_are_there_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    made = []

    class Counted(offload_times._Bench):
        def __init__(self, *arguments: Any) -> None:
            assert not alive
            super().__init__(*arguments)
            alive.add(self)
            made.append(None)

    monkeypatch.setattr(offload_times, "_Bench", Counted)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(size, size + 4), nn.GELU()) for size in (4, 8, 12, 16))
    )
    chain, costs, inputs = parts(model, torch.ones(3, 4), torch.sum)
    with_offloading({cost.kind: FAST for cost in costs.layers}, chain, costs, inputs)
    assert len(made) >= 3
    assert not alive


def test_the_profile_of_the_emulated_device_has_it() -> None:
    chain, costs, inputs = parts(small_gpt(3))
    device = EmulatedDevice(1 << 28, 1e9)
    try:
        times = measured_times(device, chain, costs, inputs)
    finally:
        device.close()
    assert len(times[costs.layers[1].kind].known) == 6


def test_devices_that_take_turns_take_longer_for_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [EmulatedDevice(1 << 20, 1e9) for _ in range(2)]
    monkeypatch.setattr(
        "atomtrain.engine.planner.allowed_cores", lambda: range(torch.get_num_threads())
    )
    try:
        times = {"a": LayerTime(1.0, 2.0, 0.25, 0.5, 1.5, 3.0), "b": LayerTime(1.0, 2.0)}
        assert times_of_all(times, devices) == {
            "a": LayerTime(2.0, 4.0, 0.5, 1.0, 3.0, 6.0),
            "b": LayerTime(2.0, 4.0),
        }
    finally:
        for device in devices:
            device.close()
