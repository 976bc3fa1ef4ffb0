"""Devices whose streams tests hold up or break."""

from __future__ import annotations

from collections.abc import Sequence

from atomtrain.engine.devices.device import Device
from atomtrain.engine.devices.devices import open_devices
from atomtrain.engine.devices.streams import Inject


def device_with(
    inject: Inject | None, device: str | Sequence[str], memory: str | int | None = None
) -> str | Sequence[str | Device]:
    """Return what `swap` takes as its device, with `inject` before each job of each stream.

    Args:
        inject: Gets the stream's name, and sleeps or raises; `None`: nothing is opened here.
        device: By name; several as a sequence.
        memory: Budget of each.
    """
    return device if inject is None else open_devices(device, memory, inject)
