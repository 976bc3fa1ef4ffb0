"""A GPU's random numbers: the host draws a seed for each operation when it is queued."""

from __future__ import annotations

import torch
from torch import Tensor


class DeviceGenerator:
    """What `torch.cuda.default_generators` holds."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._seeds = torch.Generator()

    def get_state(self) -> Tensor:
        return self._seeds.get_state()

    def set_state(self, new_state: Tensor) -> DeviceGenerator:
        self._seeds.set_state(new_state)
        return self

    def manual_seed(self, seed: int) -> DeviceGenerator:
        self._seeds.manual_seed(seed)
        return self

    def initial_seed(self) -> int:
        return self._seeds.initial_seed()

    def next_seed(self) -> int:
        """Return the seed of the next operation."""
        return int(torch.randint(2**62, (1,), generator=self._seeds))
