"""The precision that a device computes fast: what `--precision auto` stands for.

| device | `auto` |
|---|---|
| GPU that multiplies bfloat16 in hardware, as its maker's module knows | bf16 |
| older GPU: bfloat16 is emulated, and attention falls back to slow kernels | fp16 |
| processor with AMX or AVX-512 instructions for bfloat16, and what it emulates | bf16 |
| any other processor | fp32 |
"""

from __future__ import annotations

from pathlib import Path

import torch

from atomtrain.engine.devices.device import Device
from atomtrain.engine.devices.device_names import DeviceName, parse_devices
from atomtrain.engine.devices.gpus import vendor_named, vendor_of
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
    gpu = device.torch_device
    vendor = vendor_of(gpu)
    if precision != "bf16" or vendor is None or vendor.multiplies_bfloat16(gpu):
        return
    raise ConfigError(
        f"{device.name} does not compute bfloat16 in hardware{vendor.bfloat16_takes(gpu)}; choose "
        "precision fp16, also to join a run of bf16"
    )


def tf32_hint(device: Device, precision: str) -> str | None:
    """Return how products of float32 can be faster, if they are exact on a GPU that has TF32."""
    vendor = vendor_of(device.torch_device)
    exact = torch.get_float32_matmul_precision() == "highest"
    if precision != "fp32" or vendor is None or not exact:
        return None
    setting = vendor.tf32_setting(device.torch_device)
    return setting and (
        "precision fp32 multiplies without TF32; for faster products with 10 bits of mantissa "
        f"{setting}"
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
    vendor = vendor_named(device.kind)
    if vendor is not None and device.number < vendor.count():
        return "bf16" if vendor.multiplies_bfloat16(device.number) else "fp16"
    return "bf16" if _FLAGS & processor_flags() else "fp32"
