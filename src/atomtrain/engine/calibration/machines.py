"""This machine as the planner sees it: measured, or looked up where nothing shall be measured."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from atomtrain.engine.calibration.disk_profile import storage_rates
from atomtrain.engine.calibration.overhead import MeasureOverhead, Overhead
from atomtrain.engine.calibration.probes import (
    Stolen,
    device_update_parameters_per_s,
    host_copy_bytes_per_s,
    link_rates,
    stolen,
    update_parameters_per_s,
)
from atomtrain.engine.devices.device import Device
from atomtrain.engine.devices.emulated import EmulatedDevice
from atomtrain.engine.devices.host_device import HostDevice
from atomtrain.errors import ConfigError
from atomtrain.planning.catalogue import Gpu, gpu_reported_as, machine_for
from atomtrain.planning.plan.machine import Machine

_STEALING_COPY_S = 0.01
_QUICK_PARAMETERS = 1 << 18
_ENOUGH_BYTES = 1 << 30
_NO_TIME_PER_S = 1e18
"""Rate of what takes no time: copies that nobody makes, updates that compute itself makes."""


def measure_machine(
    device: Device, overhead: MeasureOverhead, folder: Path | None = None
) -> Machine:
    """Return this machine's rates, measured; takes a second or two.

    Args:
        device: Idle, with a quarter of its budget free.
        overhead: Called for the emulated device.
        folder: Whose disk is measured; `None` is that of temporary files.
    """
    if isinstance(device, HostDevice):
        return _one_memory(device, update_parameters_per_s(), folder)
    with _quiet(device) as probe:
        pinned = link_rates(probe)
        emulated = isinstance(probe, EmulatedDevice)
        # On a busy machine small copies may take as long as large ones, which seem faster by that.
        fastest = probe.link_bytes_per_s if isinstance(probe, EmulatedDevice) else math.inf
        # Ordinary memory is all that the emulated device knows.
        pageable = None if emulated else link_rates(probe, pinned=False)
        lost = _stolen(probe, pinned.load_bytes_per_s) if emulated else Stolen(0.0, 0.0)
        there = device_update_parameters_per_s(probe)
    # A GPU computes while its host hands over.
    spent = overhead() if emulated else Overhead(0.0, 0.0)
    storage = storage_rates(folder or Path(tempfile.gettempdir()))
    return Machine(
        name=device.name,
        load_bytes_per_s=min(pinned.load_bytes_per_s, fastest),
        unload_bytes_per_s=min(pinned.unload_bytes_per_s, fastest),
        update_parameters_per_s=update_parameters_per_s(),
        device_memory_bytes=budget_bytes(device),
        host_memory_bytes=host_memory_bytes(),
        both_ways_share=pinned.both_ways_share,
        compute_s_per_copied_byte=lost.s_per_copied_byte,
        compute_s_per_update=lost.s_per_update,
        device_update_parameters_per_s=there,
        compute_s_per_offloaded_storage=spent.offloaded_storage_s,
        visit_s=spent.visit_s,
        copy_s=pinned.copy_s,
        load_pageable_bytes_per_s=pageable.load_bytes_per_s if pageable else None,
        unload_pageable_bytes_per_s=pageable.unload_bytes_per_s if pageable else None,
        host_copy_bytes_per_s=host_copy_bytes_per_s(),
        storage_read_bytes_per_s=storage.read_bytes_per_s if storage else None,
        storage_write_bytes_per_s=storage.write_bytes_per_s if storage else None,
        storage_both_ways_share=storage.both_ways_share if storage else 1.0,
    )


def assumed_machine(device: Device) -> Machine:
    """Return this machine's rates without a profile: a GPU's from the catalogue.

    The emulated device's link is what it was told to be; its host optimizer is tried for some
    milliseconds.

    Raises:
        ConfigError: the GPU is not in the catalogue.
    """
    if isinstance(device, HostDevice):
        return _one_memory(device, update_parameters_per_s(_QUICK_PARAMETERS), None)
    if isinstance(device, EmulatedDevice):
        return Machine(
            name=device.name,
            load_bytes_per_s=device.link_bytes_per_s,
            unload_bytes_per_s=device.link_bytes_per_s,
            update_parameters_per_s=update_parameters_per_s(_QUICK_PARAMETERS),
            device_memory_bytes=budget_bytes(device),
            host_memory_bytes=host_memory_bytes(),
        )
    return machine_for(
        catalogue_gpu(device), host_memory_bytes(), device_memory_bytes=budget_bytes(device)
    )


def catalogue_gpu(device: Device) -> Gpu:
    """Return the catalogue's entry for a device.

    Raises:
        ConfigError: the GPU is not in the catalogue.
    """
    card = gpu_reported_as(device.name)
    if card is None:
        raise ConfigError(
            f"the GPU {device.name!r} is not in the catalogue, so its rates must be measured; "
            "leave out --no-profile"
        )
    return card


def host_memory_bytes() -> int:
    """Return the memory of this host in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def budget_bytes(*devices: Device) -> int:
    """Return what plans may use of a device's memory; of several that share a model, the least."""
    return min(max(1, device.memory_bytes - device.reserved_bytes) for device in devices)


@contextmanager
def _quiet(device: Device) -> Iterator[Device]:
    """Give a device whose streams run nothing but the measurements.

    Tests slow the streams of emulated devices on purpose, and give them less memory than a
    measurement takes.
    """
    if not isinstance(device, EmulatedDevice):
        yield device
        return
    twin = EmulatedDevice(_ENOUGH_BYTES, device.link_bytes_per_s)
    try:
        yield twin
    finally:
        twin.close()


def _one_memory(device: HostDevice, parameters_per_s: float, folder: Path | None) -> Machine:
    """Return a host that is its own device; its disk is measured if a folder is given."""
    storage = None if folder is None else storage_rates(folder)
    return Machine(
        name=device.name,
        load_bytes_per_s=_NO_TIME_PER_S,
        unload_bytes_per_s=_NO_TIME_PER_S,
        update_parameters_per_s=_NO_TIME_PER_S,
        compute_s_per_update=1 / parameters_per_s,  # they share their cores
        device_memory_bytes=budget_bytes(device),
        host_memory_bytes=host_memory_bytes(),
        host_copy_bytes_per_s=None if folder is None else host_copy_bytes_per_s(),
        storage_read_bytes_per_s=storage.read_bytes_per_s if storage else None,
        storage_write_bytes_per_s=storage.write_bytes_per_s if storage else None,
    )


def _stolen(device: Device, link_bytes_per_s: float) -> Stolen:
    matrix = torch.ones(384, 384)

    def work() -> None:
        torch.mm(matrix, matrix)

    copy_bytes = int(min(8 << 20, max(1 << 12, _STEALING_COPY_S * link_bytes_per_s)))
    return stolen(device, work, copy_bytes)
