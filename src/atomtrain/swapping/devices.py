"""Devices by name: `auto`, `cpu`, `cuda`, `cuda:1`, `emulated`, `emulated:4GiB/s`."""

from __future__ import annotations

import os

import torch

from atomtrain.errors import ConfigError, nearest
from atomtrain.swapping.cuda import CudaDevice
from atomtrain.swapping.device import Device
from atomtrain.swapping.emulated import EmulatedDevice
from atomtrain.swapping.host_device import HostDevice
from atomtrain.swapping.streams import Inject
from atomtrain.units import parse_bytes, parse_rate

DEFAULT_LINK_BYTES_PER_S = 4.0 * 2**30
"""About PCIe 3.0 with 4 lanes: a slow but real link."""
DEFAULT_EMULATED_BYTES = 1 << 30
_KINDS = ("auto", "cpu", "cuda", "emulated")


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
    kind, _, argument = name.partition(":")
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "emulated"
    if kind == "cuda":
        if argument and not argument.isdigit():
            raise ConfigError(f"device {name!r} is not a GPU; write cuda or cuda:NUMBER")
        return CudaDevice(int(argument or 0), memory_bytes, inject)
    if kind == "emulated":
        link = parse_rate(argument, "link") if argument else DEFAULT_LINK_BYTES_PER_S
        return EmulatedDevice(memory_bytes or DEFAULT_EMULATED_BYTES, link, inject)
    if name == "cpu":
        host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return HostDevice(memory_bytes or host_bytes, inject)
    raise ConfigError(
        f"there is no device {name!r}.{nearest(kind, _KINDS)} Devices: auto, cpu, cuda, "
        "cuda:NUMBER, emulated, emulated:LINK such as emulated:4GiB/s"
    )
