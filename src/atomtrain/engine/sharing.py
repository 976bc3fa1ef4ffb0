"""What changes for plans where several devices share one model."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence

import torch

from atomtrain.analysis.costs.costs import ChainCosts
from atomtrain.analysis.costs.profile import LayerTime
from atomtrain.analysis.layers.chain import Chain
from atomtrain.engine.calibration.machines import budget_bytes
from atomtrain.engine.devices.device import Device
from atomtrain.engine.devices.emulated import EmulatedDevice
from atomtrain.engine.options import Options
from atomtrain.errors import ConfigError
from atomtrain.planning.plan.machine import Machine


def check_shared(
    chain: Chain, costs: ChainCosts, options: Options, devices: Sequence[Device]
) -> None:
    """Refuse what several devices cannot share.

    Raises:
        ConfigError: layers that change buffers, which each device would change by its own share;
            an optimizer on the device; compiled layers.
    """
    if len(devices) == 1:
        return
    for layer, cost in zip(chain.layers, costs.layers, strict=True):
        if cost.changes_buffers:
            raise ConfigError(
                f"layer {layer.name!r} changes buffers (running statistics) by what it sees, and "
                "each of several devices sees a share only; use one device, or a layer without"
            )
    if options.optimizer_on_device:
        raise ConfigError(
            "several devices are updated together, on the host; leave out optimizer_on_device, or "
            "use one device"
        )
    if options.compile:
        raise ConfigError("compiled layers run on one device; leave out compile, or use one device")


def times_of_all(
    times: Mapping[str, LayerTime], devices: Sequence[Device]
) -> Mapping[str, LayerTime]:
    """Return what layers take while all devices compute: emulated ones share the host's cores."""
    if len(devices) == 1 or not isinstance(devices[0], EmulatedDevice):
        return times
    taking_turns = max(1.0, len(devices) * torch.get_num_threads() / (os.cpu_count() or 1))
    return {kind: time.scaled(taking_turns) for kind, time in times.items()}


def machine_of_all(machine: Machine, devices: Sequence[Device]) -> Machine:
    """Return the first device's machine with the least budget of all."""
    return dataclasses.replace(machine, device_memory_bytes=budget_bytes(*devices))
