"""Devices by name: `auto`, `cpu`, `cuda`, `cuda:1`, `emulated`, `emulated:4GiB/s`."""

from __future__ import annotations

import os

import torch

from atomtrain.swapping.cuda import CudaDevice
from atomtrain.swapping.device import Device
from atomtrain.swapping.device_names import parse_device
from atomtrain.swapping.emulated import EmulatedDevice
from atomtrain.swapping.host_device import HostDevice
from atomtrain.swapping.streams import Inject
from atomtrain.units import parse_bytes

DEFAULT_EMULATED_BYTES = 1 << 30


def open_device(
    name: str = "auto", memory: str | int | None = None, inject: Inject | None = None
) -> Device:
    """Return a device by name.

    Args:
        name: `auto` is the first GPU if there is one, else the emulated device. `cpu` is the host
            itself: nothing is copied.
        memory: Budget, such as `8GiB`; `None` is 90% of the GPU's free memory, all memory of the
            host for `cpu`, else 1 GiB.
        inject: Called before each job of each stream; for tests.

    Raises:
        ConfigError: no such device, or a budget that is no size.
    """
    memory_bytes = None if memory is None else parse_bytes(memory, "device memory")
    found = parse_device(name)
    kind = found.kind
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "emulated"
    if kind == "cuda":
        return CudaDevice(found.number, memory_bytes, inject)
    if kind == "cpu":
        host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return HostDevice(memory_bytes or host_bytes, inject)
    return EmulatedDevice(memory_bytes or DEFAULT_EMULATED_BYTES, found.link_bytes_per_s, inject)
