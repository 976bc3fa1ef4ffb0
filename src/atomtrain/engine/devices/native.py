"""The precision that a device computes fast: what `--precision auto` stands for.

| device | `auto` |
|---|---|
| GPU: NVIDIA's from compute capability 8.0 on, AMD's CDNA and from RDNA 3 on | bf16 |
| older GPU: bfloat16 is emulated, and attention falls back to slow kernels | fp16 |
| processor with AMX or AVX-512 instructions for bfloat16, and what it emulates | bf16 |
| any other processor | fp32 |
"""

from __future__ import annotations

from pathlib import Path

import torch

from atomtrain.engine.devices.device import Device
from atomtrain.engine.devices.device_names import DeviceName, parse_devices
from atomtrain.engine.devices.gpus import (
    capability,
    gpus,
    multiplies_bfloat16,
    multiplies_tf32,
    on_rocm,
)
from atomtrain.errors import ConfigError

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
    found = capability(device.torch_device)
    if precision != "bf16" or found is None:
        return
    if not multiplies_bfloat16(device.torch_device):
        why = "" if on_rocm() else f" (compute capability {found[0]}.{found[1]}, it takes 8.0)"
        raise ConfigError(
            f"{device.name} does not compute bfloat16 in hardware{why}; choose precision fp16, "
            "also to join a run of bf16"
        )


def tf32_hint(device: Device, precision: str) -> str | None:
    """Return how products of float32 can be faster, if they are exact on a GPU that has TF32."""
    if precision != "fp32" or capability(device.torch_device) is None:
        return None
    exact = torch.get_float32_matmul_precision() == "highest"
    if not exact or not multiplies_tf32(device.torch_device):
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
    if device.kind in ("auto", "cuda") and device.number < gpus():
        return "bf16" if multiplies_bfloat16(device.number) else "fp16"
    return "bf16" if _FLAGS & processor_flags() else "fp32"
