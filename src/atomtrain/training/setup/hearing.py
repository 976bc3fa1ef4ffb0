"""What a loss says of each row beside its value, kept while somebody listens."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from atomtrain.engine.execution.multi_device import DEVICE_NUMBER
from atomtrain.training.setup.objective import Said


class Hearing:
    """The listening of an `Objective`, whose loss calls `hear`."""

    def __init__(self) -> None:
        self._heard: list[Said] | None = None
        self._lock = threading.Lock()
        self._devices: list[int] = []
        """Which device each thing was heard from."""

    def hear(self, said: Tensor) -> None:
        """Keep what is said of a micro-batch's rows, `[B]`, if somebody listens.

        Several devices may speak at the same time, each of micro-batches of its own in their order.
        """
        number = DEVICE_NUMBER.get()
        with self._lock:
            # Costs are found with tensors without data.
            if self._heard is not None and type(said) is Tensor:
                place = bisect_right(self._devices, number)
                self._devices.insert(place, number)
                self._heard.insert(place, _kept(said))

    @contextmanager
    def listening(self) -> Iterator[list[Said]]:
        """Yield a list that gets what is said of each micro-batch's rows, in order."""
        heard: list[Said] = []
        self._heard, self._devices = heard, []
        try:
            yield heard
        finally:
            self._heard = None


def rows_heard(heard: Sequence[Said]) -> Tensor:
    """Return what `Hearing.listening` gave as one tensor on the host, `[rows]` float32."""
    return torch.cat([torch.as_tensor(part, dtype=torch.float32, device="cpu") for part in heard])


def _kept(said: Tensor) -> Said:
    """Return numbers to keep: on a device that counts every byte they must take none of it."""
    return said.tolist() if said.device.type == "cpu" else said.detach()
