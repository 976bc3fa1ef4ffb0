"""Intel's GPUs as far as they can be checked without one: what is asked, refused and said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atomtrain.engine.calibration.profile_cache import machine_key
from atomtrain.engine.devices import gpus
from atomtrain.engine.devices.devices import open_device
from atomtrain.engine.devices.native import native_precision, require_native, tf32_hint
from atomtrain.engine.devices.xpu import XPU
from atomtrain.engine.execution.compiled import require_compilable
from atomtrain.engine.execution.determinism import deterministic
from atomtrain.errors import ConfigError

GIB = 1 << 30
CARD: Any = SimpleNamespace(name="Intel(R) Arc(TM) B580", torch_device=torch.device("xpu", 0))


class Driver:
    """`torch.xpu` as it answers on some machine."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count, self.free_bytes, self.total_bytes = 0, 12 * GIB, 12 * GIB
        self.matrix_units = True
        self.failure: Exception | None = None
        patch.delenv(XPU.mask, raising=False)
        patch.setattr("torch.version.xpu", "20250301")
        patch.setattr("torch.xpu.is_available", lambda: self.count > 0)
        patch.setattr("torch.xpu.device_count", lambda: self.count)
        patch.setattr("torch.xpu.init", self._init)
        patch.setattr("torch.xpu.get_device_name", lambda _: CARD.name)
        patch.setattr("torch.xpu.mem_get_info", lambda _: (self.free_bytes, self.total_bytes))
        patch.setattr("torch.xpu.memory_reserved", lambda _: 0)
        patch.setattr("torch.xpu.get_per_process_memory_fraction", lambda _: 1.0, raising=False)
        patch.setattr("torch.xpu.get_device_properties", self._properties)

    def _init(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _properties(self, _: Any) -> Any:
        return SimpleNamespace(
            name=CARD.name,
            total_memory=self.total_bytes,
            has_subgroup_matrix_multiply_accumulate=self.matrix_units,
        )


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


def refusal(name: str = "xpu", memory: str | None = None) -> str:
    with pytest.raises(ConfigError) as found:
        open_device(name, memory)
    assert "\n" not in str(found.value)
    return str(found.value)


def test_a_torch_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.xpu", None)
    assert not XPU.driver_is_there(), "a processor's own GPU is not missed"
    said = refusal()
    assert said.startswith("there is no XPU device 0: torch ")
    assert "is built without XPU; install one built for it (https" in said
    assert said.endswith("Without a GPU use --device emulated:4GiB/s")


def test_a_torch_with_it_on_a_machine_without(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.failure = RuntimeError("No XPU devices are available.\nand more")
    assert "No XPU devices are available; sycl-ls must list the card" in refusal()
    monkeypatch.setenv(XPU.mask, "7")
    assert "ZE_AFFINITY_MASK=7 may name a card that is not there" in refusal()


def test_a_number_beyond_the_last_and_a_budget_above_the_card(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.count = 2
    assert refusal("xpu:2") == "there is no XPU device 2; 2 are usable: give xpu:0 to xpu:1"
    monkeypatch.setenv(XPU.mask, "0,1")
    assert refusal("xpu:2").endswith("; ZE_AFFINITY_MASK=0,1 hides the others")
    assert "is more than Intel(R) Arc(TM) B580 has, 12.0 GiB" in refusal(memory="13GiB")
    driver.free_bytes = GIB
    assert "(xpu-smi lists them)" in refusal(memory="2GiB")


def test_names_of_it(driver: Driver) -> None:
    assert "write xpu or xpu:NUMBER" in refusal("xpu:x")
    with pytest.raises(ConfigError, match="cannot share a model"):
        native_precision("xpu:0,cuda:0")
    with pytest.raises(ConfigError, match="name a GPU twice"):
        native_precision("xpu,xpu:0")


def test_a_torch_that_cannot_hold_a_budget(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.count = 1
    monkeypatch.delattr("torch.xpu.get_per_process_memory_fraction")
    assert "cannot limit what it takes of an Intel GPU's memory; install a newer" in refusal()


def test_auto_takes_it_and_says_what_it_computes_fast(driver: Driver) -> None:
    assert gpus.vendor_named("auto") is None
    driver.count = 1
    assert gpus.vendor_named("auto") is XPU
    assert gpus.names_gpu("auto")
    assert gpus.names_gpu("xpu:0")
    assert native_precision("auto") == native_precision("xpu") == "bf16"
    require_native(CARD, "bf16")
    driver.matrix_units = False
    assert native_precision("xpu") == "fp16"
    with pytest.raises(ConfigError, match=r"B580 does not compute bfloat16 in hardware; choose"):
        require_native(CARD, "bf16")
    assert tf32_hint(CARD, "fp32") is None


def test_what_it_is_and_what_libraries_keep(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.count = 1
    assert gpus.card_of(CARD.torch_device) == (CARD.name, 12 * GIB, 0)
    assert XPU.memory(0) == (CARD.name, 12 * GIB, 12 * GIB)
    assert gpus.library_bytes("xpu") == 0
    key = machine_key(CARD)
    assert (key["runtime"], key["capability"]) == ("XPU 20250301", [])
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    with deterministic():
        pass  # that is another maker's
    monkeypatch.setattr("torch.utils._triton.has_triton_package", lambda: True)
    require_compilable(CARD)
