"""The precision that a device computes fast: what `--precision auto` stands for.

| device | `auto` |
|---|---|
| CUDA, compute capability 8.0 and above | bf16 |
| CUDA, below 8.0: bfloat16 is emulated, and attention falls back to slow kernels | fp16 |
| processor with AMX or AVX-512 instructions for bfloat16, and what it emulates | bf16 |
| any other processor | fp32 |
"""

from __future__ import annotations

from pathlib import Path

import torch

from atomtrain.engine.devices.device import Device
from atomtrain.engine.devices.device_names import DeviceName, parse_devices
from atomtrain.errors import ConfigError

_TENSOR_CAPABILITY = (8, 0)
"""From here on GPUs multiply bfloat16 and TF32 in hardware (Ampere, 2020)."""
_FLAGS = frozenset(("amx_bf16", "avx512_bf16"))
"""As Linux names the instructions that multiply bfloat16."""
_CPUINFO = Path("/proc/cpuinfo")
_NARROWEST_LAST = ("fp32", "fp16", "bf16")


def native_precision(devices: str) -> str:
    """Return `bf16`, `fp16` or `fp32`: what all of these devices compute fast.

    Args:
        devices: As `open_devices` takes them. A GPU that is not there counts as a processor, since
            opening it says more.

    Raises:
        ConfigError: no such device.
    """
    found = {_precision_of(one) for one in parse_devices(devices)}
    return next(name for name in _NARROWEST_LAST if name in found)


def require_native(device: Device, precision: str | None) -> None:
    """Refuse bfloat16 on a GPU that only emulates it.

    Raises:
        ConfigError: says what to choose instead.
    """
    if precision != "bf16" or device.torch_device.type != "cuda":
        return
    major, minor = torch.cuda.get_device_capability(device.torch_device)
    if (major, minor) < _TENSOR_CAPABILITY:
        raise ConfigError(
            f"{device.name} does not compute bfloat16 in hardware (compute capability "
            f"{major}.{minor}, it takes 8.0); choose precision fp16, also to join a run of bf16"
        )


def tf32_hint(device: Device, precision: str) -> str | None:
    """Return how products of float32 can be faster, if they are exact on a GPU that has TF32."""
    if precision != "fp32" or device.torch_device.type != "cuda":
        return None
    exact = torch.get_float32_matmul_precision() == "highest"
    if not exact or torch.cuda.get_device_capability(device.torch_device) < _TENSOR_CAPABILITY:
        return None
    return (
        "precision fp32 multiplies without TF32; for faster products with 10 bits of mantissa set "
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 in the environment, or call "
        "torch.set_float32_matmul_precision('high') in Python"
    )


def processor_flags() -> frozenset[str]:
    """Return the instructions that the processor has, as Linux names them; elsewhere none."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def _precision_of(device: DeviceName) -> str:
    on_gpu = device.kind == "cuda" or (device.kind == "auto" and torch.cuda.is_available())
    if on_gpu and device.number < torch.cuda.device_count():
        capable = torch.cuda.get_device_capability(device.number) >= _TENSOR_CAPABILITY
        return "bf16" if capable else "fp16"
    return "bf16" if _FLAGS & processor_flags() else "fp32"
