"""Devices by name: `auto`, `cpu`, `cuda`, `cuda:1`, `xpu`, `emulated`, `emulated:4GiB/s`."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from atomtrain.engine.devices.device import Device
from atomtrain.engine.devices.device_names import DeviceName, parse_device, parse_devices
from atomtrain.engine.devices.gpu_device import GpuDevice
from atomtrain.engine.devices.gpus import driver_is_there, vendor_named, vendor_of, why_none
from atomtrain.engine.devices.host_memory import host_memory
from atomtrain.engine.devices.processor import EmulatedDevice, HostDevice
from atomtrain.engine.devices.streams import Inject
from atomtrain.errors import ConfigError
from atomtrain.units import parse_bytes

DEFAULT_EMULATED_BYTES = 1 << 30
_logger = logging.getLogger(__name__)


def open_device(
    name: str = "auto", memory: str | int | None = None, inject: Inject | None = None
) -> Device:
    """Return a device by name.

    Args:
        name: `auto` is the first GPU if there is one, else the emulated device. `cpu` is the host
            itself: nothing is copied.
        memory: Budget, such as `8GiB`; `None` is 90% of the GPU's free memory, what is available
            on the host for `cpu`, else 1 GiB.
        inject: Called before each job of each stream; for tests.

    Raises:
        ConfigError: no such device, or a budget that is not a size.
    """
    memory_bytes = None if memory is None else parse_bytes(memory, "device memory")
    device = _opened(parse_device(name), memory_bytes, inject)
    device.asked_bytes = memory_bytes
    return device


def _opened(found: DeviceName, memory_bytes: int | None, inject: Inject | None) -> Device:
    vendor = vendor_named(found.kind)
    if vendor is not None:
        return GpuDevice(vendor, found.number, memory_bytes, inject)
    if found.kind == "auto" and driver_is_there():
        _logger.warning("training on the emulated device, without the GPU: %s", why_none())
    if found.kind == "cpu":
        return HostDevice(memory_bytes or host_memory().usable_bytes, inject)
    return EmulatedDevice(memory_bytes or DEFAULT_EMULATED_BYTES, found.link_bytes_per_s, inject)


def open_devices(
    names: str | Device | Sequence[str | Device],
    memory: str | int | None = None,
    inject: Inject | None = None,
) -> list[Device]:
    """Return devices that share a model: one, or several of a kind.

    Args:
        names: A name as `open_device` takes it, several with commas between them, an open device,
            or a sequence of names and open devices.
        memory: Budget of each of those that are named.
        inject: As of `open_device`.

    Raises:
        ConfigError: no such device, a budget that is not a size, or devices that cannot share a
            model.
    """
    given = [names] if isinstance(names, str) or not isinstance(names, Sequence) else list(names)
    if not given:
        raise ConfigError("give at least one device, such as 'cuda' or 'emulated:4GiB/s'")
    wanted: list[str | Device] = []
    for one in given:
        wanted += one.split(",") if isinstance(one, str) else [one]
    if len(wanted) > 1 and all(isinstance(one, str) for one in wanted):
        parse_devices(",".join(str(one) for one in wanted))
    opened: list[Device] = []
    try:
        for one in wanted:
            if isinstance(one, str):
                one = open_device(one.strip(), memory, inject)  # noqa: PLW2901
            opened.append(one)
        _check_together(opened)
    except BaseException:
        for device in opened:
            device.close()
        raise
    return opened


def _check_together(devices: Sequence[Device]) -> None:
    if len(devices) == 1:
        return
    kinds = {(type(device), device.torch_device.type) for device in devices}
    if len(kinds) > 1 or any(device.one_memory for device in devices):
        raise ConfigError(
            "these devices cannot share a model; give several GPUs, such as cuda:0,cuda:1, or "
            "several emulated devices"
        )
    gpus = [device.torch_device for device in devices if vendor_of(device.torch_device)]
    if len(set(gpus)) < len(gpus):
        raise ConfigError("the devices name a GPU twice; give each one once")
