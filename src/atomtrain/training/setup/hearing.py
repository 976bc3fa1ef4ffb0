"""What a loss says of each row beside its value, kept while somebody listens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from atomtrain.training.setup.objective import Said


class Hearing:
    """The listening of an `Objective`, whose loss calls `hear`."""

    def __init__(self) -> None:
        self._heard: list[Said] | None = None

    def hear(self, said: Tensor) -> None:
        """Keep what is said of a micro-batch's rows, `[B]`, if somebody listens."""
        # Costs are found with tensors without data.
        if self._heard is not None and type(said) is Tensor:
            self._heard.append(_kept(said))

    @contextmanager
    def listening(self) -> Iterator[list[Said]]:
        """Yield a list that gets what is said of each micro-batch's rows, in order."""
        heard: list[Said] = []
        self._heard = heard
        try:
            yield heard
        finally:
            self._heard = None


def rows_heard(heard: Sequence[Said]) -> Tensor:
    """Return what `Hearing.listening` gave as one tensor on the host, `[rows]` float32."""
    return torch.cat([torch.as_tensor(part, dtype=torch.float32, device="cpu") for part in heard])


def _kept(said: Tensor) -> Said:
    """Return numbers to keep: on a device that counts every byte they must take none of it."""
    return said.detach() if said.is_cuda else said.tolist()
