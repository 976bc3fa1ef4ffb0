"""Measures the rates of this host and link that the planner needs."""

from __future__ import annotations

import os
import time

import torch

from atomtrain.planning.machine import Machine
from atomtrain.swapping.device import Device
from atomtrain.swapping.emulated import EmulatedDevice

_PROBE_BYTES = 64 << 20
_PROBE_PARAMETERS = 1 << 21


def measure_machine(device: Device) -> Machine:
    """Return this machine's rates; takes well under a second."""
    if isinstance(device, EmulatedDevice):
        load = unload = device.link_bytes_per_s
    else:
        load, unload = _link_bytes_per_s(device)
    return Machine(
        name=device.name,
        load_bytes_per_s=load,
        unload_bytes_per_s=unload,
        update_parameters_per_s=_update_parameters_per_s(),
        device_memory_bytes=max(1, device.memory_bytes - device.reserved_bytes),
        host_memory_bytes=host_memory_bytes(),
    )


def host_memory_bytes() -> int:
    """Return the memory of this host in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _link_bytes_per_s(device: Device) -> tuple[float, float]:
    n_bytes = min(_PROBE_BYTES, device.memory_bytes // 4)
    host = device.host_empty(n_bytes)
    with device.computing():
        there = device.empty((n_bytes,), torch.uint8)
    rates = []
    for stream, job in (
        (device.load, lambda: device.copy_in(there, host)),
        (device.unload, lambda: device.copy_out(host, there)),
    ):
        stream.submit(job, [device.mark()]).wait()
        started_s = time.perf_counter()
        stream.submit(job).wait()
        rates.append(n_bytes / (time.perf_counter() - started_s))
    return rates[0], rates[1]


def _update_parameters_per_s() -> float:
    parameter = torch.nn.Parameter(torch.zeros(_PROBE_PARAMETERS))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.step()
    started_s = time.perf_counter()
    optimizer.step()
    return _PROBE_PARAMETERS / (time.perf_counter() - started_s)
