"""Which precision is taken where nobody chooses one, and what a GPU is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atomtrain.engine.devices import native
from atomtrain.engine.devices.native import (
    native_precision,
    processor_flags,
    require_native,
    tf32_hint,
)
from atomtrain.errors import ConfigError

VARIABLE = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
AMX, AVX, NEITHER = "amx_bf16 amx_tile", "avx512f avx512_bf16", "avx2 avx512f f16c"
V100, TURING, AMPERE, HOPPER = (7, 0), (7, 5), (8, 0), (9, 0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a call that sets the GPUs' compute capabilities and the processor's flags."""

    def has(*capabilities: tuple[int, int], flags: str = NEITHER) -> None:
        cpuinfo = tmp_path / "cpuinfo"
        cpuinfo.write_text(f"processor : 0\nflags\t\t: {flags}\n\nprocessor : 1\nflags : {flags}\n")
        monkeypatch.setattr(native, "_CPUINFO", cpuinfo)
        monkeypatch.setattr("torch.cuda.is_available", lambda: bool(capabilities))
        monkeypatch.setattr("torch.cuda.device_count", lambda: len(capabilities))
        monkeypatch.setattr(
            "torch.cuda.get_device_capability",
            lambda device: capabilities[getattr(device, "index", device)],
        )

    return has


def gpu(kind: str = "cuda") -> Any:
    return SimpleNamespace(name="Tesla V100", torch_device=torch.device(kind, 0))


@pytest.mark.parametrize(
    ("capabilities", "flags", "devices", "precision"),
    [
        ([HOPPER], NEITHER, "auto", "bf16"),
        ([AMPERE], NEITHER, "cuda", "bf16"),
        ([TURING], AMX, "auto", "fp16"),
        ([V100], NEITHER, "cuda:0", "fp16"),
        ([(6, 1)], NEITHER, "auto", "fp16"),
        ([HOPPER, V100], NEITHER, "cuda:0,cuda:1", "fp16"),
        ([HOPPER, AMPERE], NEITHER, "cuda:0,cuda:1", "bf16"),
        ([HOPPER], NEITHER, "cpu", "fp32"),
        ([HOPPER], NEITHER, "emulated:4GiB/s", "fp32"),
        ([], NEITHER, "auto", "fp32"),
        ([], AMX, "auto", "bf16"),
        ([], AVX, "cpu", "bf16"),
        ([], AVX, "emulated,emulated", "bf16"),
        ([], NEITHER, "cuda:3", "fp32"),
    ],
)
def test_what_auto_stands_for(
    machine: Any, capabilities: list[tuple[int, int]], flags: str, devices: str, precision: str
) -> None:
    machine(*capabilities, flags=flags)
    assert native_precision(devices) == precision


def test_flags_are_read_where_linux_has_them(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(flags=AMX)
    assert processor_flags() == {"amx_bf16", "amx_tile"}
    monkeypatch.setattr(native, "_CPUINFO", Path("/nowhere/cpuinfo"))
    assert processor_flags() == frozenset()


@pytest.mark.parametrize("capability", [(6, 1), V100, TURING])
def test_bfloat16_is_refused_where_it_is_emulated(machine: Any, capability: Any) -> None:
    machine(capability)
    major, minor = capability
    with pytest.raises(
        ConfigError, match=rf"Tesla V100 .*capability {major}\.{minor}, .*choose precision fp16"
    ) as refused:
        require_native(gpu(), "bf16")
    assert "\n" not in str(refused.value)
    for precision in ("fp16", "fp32", None):
        require_native(gpu(), precision)
    require_native(gpu("cpu"), "bf16")


def test_bfloat16_is_taken_where_it_is_in_hardware(machine: Any) -> None:
    machine(AMPERE)
    require_native(gpu(), "bf16")


def test_float32_on_a_gpu_says_how_tf32_is_had(machine: Any) -> None:
    machine(HOPPER)
    assert f"{VARIABLE}=1" in str(tf32_hint(gpu(), "fp32"))
    assert tf32_hint(gpu(), "bf16") is None
    assert tf32_hint(gpu("cpu"), "fp32") is None
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert tf32_hint(gpu(), "fp32") is None, "it is on already"
    finally:
        torch.set_float32_matmul_precision(before)
    machine(V100)
    assert tf32_hint(gpu(), "fp32") is None, "it has none"


@pytest.mark.slow
def test_the_environment_variable_turns_tf32_on() -> None:
    code = "import torch; print(torch.get_float32_matmul_precision())"
    found = [
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, VARIABLE: value}, text=True,
            capture_output=True, check=True,
        ).stdout.strip()
        for value in "01"
    ]  # fmt: skip
    assert found == ["highest", "high"]
