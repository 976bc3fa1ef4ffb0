"""The swap engine on GPUs in software: the tests of real ones, and some that need no speed.

They run where there is no GPU. See `software_gpu` for what that shows, and what not.
"""

from __future__ import annotations

import dataclasses
import gc
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import atomtrain
from atomtrain.analysis import chain_of
from atomtrain.analysis.costs.costs import layer_costs
from atomtrain.engine.calibration import compile_choice
from atomtrain.engine.calibration.machines import Overhead
from atomtrain.engine.calibration.profiling import measured_times, profiled_machine
from atomtrain.engine.devices import gpus as gpus_module
from atomtrain.engine.devices import pinning
from atomtrain.engine.devices.cuda import CUDA
from atomtrain.engine.devices.gpu_device import GpuDevice
from atomtrain.engine.devices.host_memory import aligned_empty
from atomtrain.engine.devices.streams import Inject
from atomtrain.engine.devices.xpu import Xpu
from atomtrain.engine.updates.optimizer import OptimizerFactory
from atomtrain.errors import ConfigError, DeviceMemoryError, PlanError
from atomtrain.models import GPT, GPTConfig
from atomtrain.optimizers import SGD, AdamW, Muon
from atomtrain.planning.plan.shape import Activation
from tests.gpu import test_cuda
from tests.gpu.test_cuda import (
    adamw,
    assert_equal,
    batches,
    untied_gpt,
)
from tests.support.injecting import device_with
from tests.support.software_gpu import SoftwareGpus, installed

pytestmark = [
    pytest.mark.skipif(
        torch.backends.cuda.is_built(), reason="a real torch.cuda is not to be replaced"
    ),
    pytest.mark.usefixtures("assumed_times"),
]
SMALL = GPTConfig(
    layers=6, width=32, heads=2, head_width=16, vocabulary=64, context=16, dropout=0.1
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train a model that the processor computes quickly."""
    monkeypatch.setattr(test_cuda, "CONFIG", SMALL)
    monkeypatch.setattr(test_cuda, "STEPS", 2)
    # torch's fake tensors are on a GPU only where it has CUDA.
    monkeypatch.setattr(
        "atomtrain.engine.api.layer_costs",
        lambda chain, inputs, _: layer_costs(chain, inputs, "cpu"),
    )


@pytest.fixture(autouse=True)
def gpus(small: None) -> Iterator[SoftwareGpus]:
    """Two GPUs, on which nothing may happen without order."""
    with installed(count=2) as made:
        yield made
    assert made.reports == []


def own_adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The one that keeps float32 masters of parameters of 16 bits."""
    return AdamW(parameters, lr=1e-3)


def own_sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return SGD(parameters, lr=1e-2, momentum=0.9)


def own_muon(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in parameters if p.ndim == 2], "algorithm": "muon"},
        {"params": [p for p in parameters if p.ndim != 2], "algorithm": "adamw"},
    ]
    return Muon(groups, lr=1e-3)


def trained(
    device: str = "cuda:0",
    optimizer: OptimizerFactory = adamw,
    inject: Inject | None = None,
    **options: Any,
) -> tuple[dict[str, Tensor], atomtrain.Engine]:
    """Train; return the parameters, and the engine, which is closed."""
    model, steps = untied_gpt(), batches(3)
    torch.manual_seed(2)
    with atomtrain.swap(
        model, steps[0][0], optimizer=optimizer, device=device_with(inject, device, "112MiB"),
        device_memory="112MiB",
        options=atomtrain.Options(**{"micro_batches": 3, "host_layers": 0, **options}),
    ) as engine:  # fmt: skip
        for step in steps:
            engine.step(step)
        return {name: value.clone() for name, value in engine.state_dict().items()}, engine


@pytest.mark.parametrize("clip_norm", [1.0, None])
def test_updates_on_the_gpu(clip_norm: float | None) -> None:
    """Resident blocks stay there, with their moments."""
    expected, _ = trained(clip_norm=clip_norm, optimizer_on_device=False, segments=1)
    found, engine = trained(clip_norm=clip_norm, optimizer_on_device=True)
    assert engine.plan.device_blocks
    assert_equal(found, expected)


@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [("bf16", own_adamw), ("fp16", own_adamw), ("bf16", own_sgd), ("bf16", own_muon)],
)
def test_16_bits_with_float32_masters(precision: str, optimizer: OptimizerFactory) -> None:
    ways: list[dict[str, Any]] = [
        {"segments": 1, "optimizer_on_device": False},
        {"segments": 8, "optimizer_on_device": False, "activations": "offload"},
        {"optimizer_on_device": True},
    ]
    found = [trained(precision=precision, optimizer=optimizer, **way)[0] for way in ways]
    assert found[0]["head.weight"].dtype == torch.float32
    assert_equal(found[1], found[0])
    assert_equal(found[2], found[0])


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_first_layer_that_only_looks_up_on_the_host(
    precision: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = dataclasses.replace(SMALL, vocabulary=4096, dropout=0.0)
    monkeypatch.setattr(test_cuda, "CONFIG", large)
    found = [
        trained(
            precision=precision, optimizer=own_adamw, host_layers=count, optimizer_on_device=False
        )
        for count in (0, 1)
    ]
    assert [engine.plan.host_layers for _, engine in found] == [0, 1]
    assert_equal(found[0][0], found[1][0])


def test_without_triton_auto_leaves_layers_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compile_choice, "TRIED_ON", frozenset({"cuda"}))
    monkeypatch.setattr("torch.utils._triton.has_triton_package", lambda: False)
    expected, _ = trained(compile=False)
    found, engine = trained(compile="auto")
    assert_equal(found, expected)
    assert str(engine.compiling).startswith("not compiled: compiling for a GPU needs Triton")
    assert [record.getMessage() for record in caplog.records] == [str(engine.compiling)]
    with pytest.raises(ConfigError, match="needs Triton"):
        trained(compile=True)


def test_in_deterministic_runs_bits_do_not_depend_on_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host rounds otherwise than a GPU: where something runs is not left to the planner."""
    large = dataclasses.replace(SMALL, vocabulary=4096, dropout=0.0)
    monkeypatch.setattr(test_cuda, "CONFIG", large)
    _, free = trained(host_layers=None)
    assert free.plan.host_layers or free.plan.device_blocks, "else this would show nothing"
    _, engine = trained(host_layers=None, deterministic=True)
    assert (engine.plan.host_layers, engine.plan.device_blocks) == (0, ())
    _, engine = trained(host_layers=1, deterministic=True)
    assert engine.plan.host_layers == 1
    _, engine = trained(host_layers=None, optimizer_on_device=True, deterministic=True)
    assert engine.plan.device_blocks


def test_a_plan_of_before_is_followed() -> None:
    expected, first = trained()
    kept = first.kept_plan()
    found, engine = trained(plan=kept)
    assert engine.planner.before == "as before"
    assert engine.plan.shape == first.plan.shape
    assert_equal(found, expected)


def test_compute_waits_once_for_what_came_in_one_job() -> None:
    device = GpuDevice(CUDA, 0, 128 << 20)
    try:
        with device.computing():
            event = device.load.submit(lambda: torch.cuda._sleep(test_cuda.CYCLES))
            for _ in range(3):
                device.hold(event)
            device.synchronize()
            assert len(device._waits) == 1
    finally:
        device.close()


def test_two_gpus_share_a_step() -> None:
    found = [
        trained("cuda:0,cuda:1", segments=segments, optimizer_on_device=False)[0]
        for segments in (2, 8)
    ]
    assert_equal(*found)


def test_a_budget_that_is_exceeded_says_what_to_do() -> None:
    ids = torch.randint(64, (1, 16))
    batch = {"input_ids": ids, "labels": ids}
    options = atomtrain.Options(segments=4, host_layers=0, optimizer_on_device=False)
    with atomtrain.swap(
        GPT(SMALL), batch, optimizer=adamw, device="cuda", device_memory="128MiB", options=options
    ) as engine:
        engine.step([batch])
        torch.cuda.set_per_process_memory_fraction(
            torch.cuda.memory_allocated() / torch.cuda.mem_get_info()[1]
        )
        with pytest.raises(DeviceMemoryError, match="raise --device-memory or use smaller"):
            engine.step([batch])


@pytest.mark.parametrize("allowed_bytes", [0, 160 << 10, 320 << 10])
@pytest.mark.parametrize("activations", ["offload", "recompute"])
def test_memory_that_is_not_pinned_gives_the_same_bits(
    allowed_bytes: int, activations: Activation, gpus: SoftwareGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of some pages, the rest by way of rings, or of ordinary memory."""
    expected = trained(segments=8, activations=activations, optimizer_on_device=False)[0]
    monkeypatch.setattr(pinning, "CHUNK_BYTES", 64 << 10)
    monkeypatch.setattr(pinning, "RING_BYTES", 8 << 10)
    staged: list[int] = []
    made = pinning.StagingRing._made

    def counted(ring: pinning.StagingRing) -> Any:
        staged.append(len(buffers := made(ring)))
        return buffers

    monkeypatch.setattr(pinning.StagingRing, "_made", counted)
    gc.collect()  # what is pinned still counts
    gpus.pinned.most_bytes = allowed_bytes
    found, engine = trained(segments=8, activations=activations, optimizer_on_device=False)
    assert_equal(found, expected)
    assert set(staged) == ({0} if not allowed_bytes else {2}), "not all could be pinned"
    assert engine.last is not None
    assert engine.last.allocation_retries == 0
    assert engine.last.device_reserved_bytes >= engine.last.device_peak_bytes


class Renamed(Xpu):
    """Intel's module, whose GPUs are those in software, and are called as these are."""

    kind, api = "cuda", torch.cuda

    def __init__(self, gpus: SoftwareGpus) -> None:
        self._gpus = gpus
        self.rings = 0

    def pinned_empty(self, n_bytes: int) -> Tensor:
        memory = aligned_empty(n_bytes)
        assert self._gpus.pinned.register(memory.data_ptr(), n_bytes) == 0
        self.rings += 1
        return memory


@pytest.mark.parametrize("activations", ["offload", "recompute"])
def test_a_gpu_that_cannot_pin_in_place_gives_the_same_bits(
    activations: Activation, gpus: SoftwareGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Intel's: every copy passes through its stream's ring."""
    options: dict[str, Any] = {
        "segments": 8, "activations": activations, "optimizer_on_device": False,
        "inject": lambda stream: time.sleep(0.002 * (stream != "update")),
    }  # fmt: skip
    expected = trained(**options)[0]
    gc.collect()
    assert gpus.pinned.ranges == {}
    vendor = Renamed(gpus)
    monkeypatch.setattr(gpus_module, "VENDORS", (vendor,))
    found, engine = trained(**options)
    assert isinstance(engine.device, GpuDevice)
    assert engine.device.vendor is vendor
    assert vendor.rings == len(gpus.pinned.ranges) == 4, "of load, fetch, unload and save, no more"
    assert_equal(found, expected)


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_gradients_spent_at_once(precision: str | None) -> None:
    """Unloads wait for updates, which wait for unloads of the segment before last."""
    options: dict[str, Any] = {
        "precision": precision, "optimizer": own_adamw, "segments": 8, "optimizer_on_device": False,
        "inject": lambda stream: time.sleep(0.02 * (stream == "update")),
    }  # fmt: skip
    expected, kept = trained(**options)
    found, spent = trained(spend_gradients=True, **options)
    assert spent.plan.host_bytes < kept.plan.host_bytes
    assert_equal(found, expected)


@pytest.mark.parametrize("what", ["layers", "machine"])
def test_a_profile_that_does_not_fit_names_a_budget_that_would_do(
    what: str, tmp_path: Path
) -> None:
    batch = batches(1)[0][0]
    traced = chain_of(untied_gpt(), batch, device=torch.device("cuda", 0))
    inputs = traced.bind(batch)
    costs = layer_costs(traced.chain, inputs)

    def measure(device: GpuDevice) -> object:
        try:
            if what == "layers":
                return measured_times(device, traced.chain, costs, inputs)
            return profiled_machine(device, lambda: Overhead(0.0, 0.0), tmp_path)
        finally:
            device.close()

    device = GpuDevice(CUDA, 0, 128 << 20)
    in_use = torch.cuda.memory_allocated() / torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(in_use)
    with pytest.raises(PlanError, match="cannot be measured within --device-memory 128") as no:
        measure(device)
    told = re.search(r"raise it to (\d+)MiB", str(no.value))
    assert told is not None
    assert measure(GpuDevice(CUDA, 0, int(told[1]) << 20))
