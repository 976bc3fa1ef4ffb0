"""GPUs that cannot be used: one line each, which says why and what to do."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atomtrain.engine.calibration.machines import catalogue_gpu
from atomtrain.engine.devices import cuda, gpus
from atomtrain.engine.devices.devices import open_device
from atomtrain.errors import ConfigError
from atomtrain.training.tools import doctor

GIB = 1 << 30


class Driver:
    """`torch.cuda` as it answers on some machine."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count, self.free_bytes, self.total_bytes, self.reserved_bytes = 0, GIB, GIB, 0
        self.name = "NVIDIA GeForce RTX 4090"
        self.failure: Exception | None = None
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        patch.setattr("torch.version.cuda", "13.0")
        patch.setattr("torch.cuda.is_available", self._available)
        patch.setattr("torch.cuda.device_count", lambda: self.count)
        patch.setattr("torch.cuda.init", self._init)
        patch.setattr("torch.cuda.get_device_name", lambda _: self.name)
        patch.setattr("torch.cuda.mem_get_info", lambda _: (self.free_bytes, self.total_bytes))
        patch.setattr("torch.cuda.memory_reserved", lambda _: self.reserved_bytes)

    def _available(self) -> bool:
        if self.failure is not None:
            warnings.warn(f"CUDA initialization: {self.failure}", UserWarning, stacklevel=1)
        return self.count > 0

    def _init(self) -> None:
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


def refusal(name: str = "cuda", memory: str | None = None) -> str:
    """Return the one line with which a device is refused; a warning beside it is an error."""
    with pytest.raises(ConfigError) as found:
        open_device(name, memory)
    assert "\n" not in str(found.value)
    return str(found.value)


def test_torch_without_cuda(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    assert "is built without CUDA; install one built for it (https" in refusal()


def test_no_driver(driver: Driver) -> None:
    driver.failure = RuntimeError(
        "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and "
        "installed a driver from http://www.nvidia.com/Download/index.aspx"
    )
    said = refusal()
    assert said.startswith("there is no CUDA device 0: there is no NVIDIA driver; install it so")
    assert said.endswith("Without a GPU use --device emulated:4GiB/s")


def test_a_driver_that_is_too_old(driver: Driver) -> None:
    driver.failure = RuntimeError(
        "The NVIDIA driver on your system is too old (found version 12020). Please update your "
        "GPU driver by downloading and installing a new version"
    )
    said = refusal()
    assert "needs one for CUDA 13.0, this one has 12.2; update the driver, or install an" in said


@pytest.mark.parametrize("value", ["", "-1"])
def test_all_gpus_are_hidden(driver: Driver, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    driver.failure = RuntimeError("No CUDA GPUs are available")
    assert f"CUDA_VISIBLE_DEVICES={value!r} hides all GPUs; unset it" in refusal()


def test_a_visible_card_that_is_not_there(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    driver.failure = RuntimeError("No CUDA GPUs are available")
    assert "CUDA_VISIBLE_DEVICES=7 may name a card that is not there" in refusal()


def test_a_number_beyond_the_last(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.count = 2
    said = refusal("cuda:2")
    assert said == "there is no CUDA device 2; 2 are usable: give cuda:0 to cuda:1"
    driver.count = 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert refusal("cuda:3").endswith("give cuda:0; CUDA_VISIBLE_DEVICES=3 hides the others")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a1,MIG-b2")
    assert refusal("cuda:1").endswith("one MIG slice, so start one process for each")


def test_a_budget_above_the_card_or_a_slice_of_it(driver: Driver) -> None:
    driver.count, driver.free_bytes, driver.total_bytes = 1, 23 * GIB, 24 * GIB
    said = refusal(memory="25GiB")
    assert said.startswith("--device-memory 25.0 GiB is more than NVIDIA GeForce RTX 4090 has")
    assert said.endswith(f"24.0 GiB; give at most {int(0.9 * 23 * 1024)}MiB")
    driver.name, driver.total_bytes = "NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10 * GIB
    assert "MIG 1g.10gb (a MIG slice) has, 10.0 GiB; give at most" in refusal(memory="25GiB")


def test_a_card_that_others_use(driver: Driver) -> None:
    driver.count, driver.free_bytes, driver.total_bytes = 1, 4 * GIB, 24 * GIB
    said = refusal(memory="20GiB")
    assert "others use 20.0 GiB of NVIDIA GeForce RTX 4090; end them (nvidia-smi lists" in said
    assert said.endswith("or give at most 3686MiB")
    assert gpus.budget_of(cuda.CUDA, 0, None) == int(0.9 * 4 * GIB)
    driver.reserved_bytes = 17 * GIB
    assert gpus.budget_of(cuda.CUDA, 0, 20 * GIB) == 20 * GIB, (
        "this process can use again what it has"
    )


@pytest.mark.parametrize(
    "why", ["CUDA error: out of memory", "CUDA error: CUDA-capable device(s) is/are busy"]
)
def test_a_card_that_others_have_to_themselves(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Asking for its memory already starts the driver, which takes some of it."""

    def refuse(_: int) -> None:
        raise RuntimeError(f"{why}\nCompile with TORCH_USE_CUDA_DSA to enable assertions.\n")

    driver.count = 1
    monkeypatch.setattr("torch.cuda.mem_get_info", refuse)
    assert refusal() == (
        f"CUDA device 0 cannot be used: {why}; end what uses it (nvidia-smi lists it), or give "
        "another device"
    )
    [found] = doctor._device()
    assert (found.check, found.state) == ("cuda:0", doctor.PROBLEM)
    assert found.detail == f"CUDA device 0 cannot be used: {why}"
    assert found.fix.startswith("end what uses it")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("NVIDIA Voodoo 9", "the GPU 'NVIDIA Voodoo 9' is not in the catalogue, so its rates must"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "catalogue, which has whole cards, no MIG slices"),
    ],
)
def test_an_unknown_card_must_be_measured(name: str, said: str) -> None:
    class Device:
        pass

    device = Device()
    device.name = name  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="leave out --no-profile") as found:
        catalogue_gpu(device)  # type: ignore[arg-type]
    assert said in str(found.value)


def test_auto_says_why_it_does_not_take_the_gpu(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setattr(cuda, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(cuda, "AMD_DRIVER", tmp_path / "kfd")
    open_device("auto").close()
    assert caplog.messages == [], "there is no driver, so nobody expects a GPU"
    (tmp_path / "version").touch()
    driver.failure = RuntimeError("The NVIDIA driver on your system is too old (found version 1)")
    open_device("auto").close()
    [told] = caplog.messages
    assert told.startswith("training on the emulated device, without the GPU: the NVIDIA driver is")


def test_amds_driver_without_a_torch_for_it(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr(cuda, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(cuda, "AMD_DRIVER", tmp_path)
    assert gpus.driver_is_there()
    assert "is built without ROCm; install one built for it (https" in refusal()


def test_a_torch_for_amds_gpus(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr("torch.version.hip", "7.0")
    assert cuda.CUDA.runtime() == "ROCm 7.0"
    driver.failure = RuntimeError("No HIP GPUs are available")
    assert "No HIP GPUs are available; rocm-smi must list the card" in refusal()
    driver.failure, driver.count, driver.name = None, 1, "AMD Radeon RX 7900 XTX"
    driver.free_bytes, driver.total_bytes = 4 * GIB, 24 * GIB
    assert "end them (rocm-smi lists them)" in refusal(memory="20GiB")


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("AMD Radeon RX 7900 XTX", "rx-7900-xtx"),
        ("AMD Instinct MI250X/MI250", "mi250"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_amds_gpus_are_in_the_catalogue(name: str, entry: str) -> None:
    device: Any = SimpleNamespace(name=name)
    assert catalogue_gpu(device).name == entry


@pytest.mark.parametrize(
    ("architecture", "native"),
    [
        ("gfx90a:sramecc+:xnack-", True),
        ("gfx942", True),
        ("gfx1100", True),
        ("gfx906:sramecc+:xnack-", False),
        ("gfx1030", False),
        ("gfx90c:xnack-", False),
    ],
)
def test_which_of_amds_gpus_multiply_bfloat16(
    monkeypatch: pytest.MonkeyPatch, architecture: str, native: bool
) -> None:
    """Their compute capabilities do not tell: that of gfx906 and of gfx90a is 9.0."""
    monkeypatch.setattr("torch.version.hip", "7.0")
    properties = SimpleNamespace(gcnArchName=architecture)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: properties)
    assert cuda.CUDA.multiplies_bfloat16(0) is native
    assert cuda.CUDA.tf32_setting(0) is None


def test_what_a_gpu_is(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="H100", total_memory=80 * GIB, L2_cache_size=50 << 20)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: properties)
    assert gpus.card_of(torch.device("cuda", 1)) == ("H100", 80 * GIB, 50 << 20)
    assert cuda.CUDA.card(0) == gpus.card_of(torch.device("cuda", 1))
    assert gpus.card_of(torch.device("cpu")) is None
    driver.free_bytes, driver.total_bytes = GIB // 4, GIB
    assert cuda.CUDA.memory(0) == (driver.name, GIB // 4, GIB)
