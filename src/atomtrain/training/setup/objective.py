"""What is learnt from a batch: its micro-batches, and the loss of a model's output.

A GPT computes its own loss. A Hugging Face model gets the loss from here, on the same logits and
targets as its own would be: the model's own shifts the targets by one, here they come shifted.
Targets of -100 do not count, and every target that does counts alike, in whichever micro-batch.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from atomtrain.data.examples import IGNORED
from atomtrain.data.sampler import Batch
from atomtrain.engine.execution.multi_device import DEVICE_NUMBER
from atomtrain.models.gpt import places

MicroBatch = dict[str, Tensor]
Said = Tensor | list[float]
"""What a loss says of each row of a micro-batch, beside its value."""


class Objective(Protocol):
    """Between batches and the engine."""

    together: int
    """So many sequences, one after the other, belong together in a micro-batch."""

    @property
    def loss(self) -> Callable[[Any, Mapping[str, Tensor]], Tensor] | None:
        """For `swap`; `None` if the model has its own."""
        ...

    def micro_batches(self, batch: Batch, sequences: int) -> list[MicroBatch]:
        """Divide a batch into micro-batches of so many sequences.

        Args:
            batch: `[S, T]` inputs and labels; labels are the next tokens.
            sequences: A divisor of S.
        """
        ...

    def listening(self) -> AbstractContextManager[list[Said]]:
        """Give a list that the loss fills with what `numbers` needs, until the context is left."""
        ...

    def numbers(
        self, heard: Sequence[Said], micro_batches: Sequence[MicroBatch]
    ) -> dict[str, float]:
        """Return further numbers of these micro-batches, by the names that events have."""
        ...


class _LossOnly:
    """Tells nothing but its loss."""

    together = 1

    def listening(self) -> AbstractContextManager[list[Said]]:
        return nullcontext([])

    def numbers(
        self, heard: Sequence[Said], micro_batches: Sequence[MicroBatch]
    ) -> dict[str, float]:
        return {}


class OwnLoss(_LossOnly):
    """The model takes labels and returns its loss."""

    loss = None

    def inputs(self, batch: Batch) -> MicroBatch:
        """Return what the model's forward takes of a batch, `[S, T]` each."""
        if batch.documents is None:
            return {"input_ids": batch.inputs}
        return {"input_ids": batch.inputs, "documents": batch.documents}

    def micro_batches(self, batch: Batch, sequences: int) -> list[MicroBatch]:
        entries = {**self.inputs(batch), "labels": batch.labels}
        return [
            {name: entry[rows] for name, entry in entries.items()}
            for rows in rows_of(batch, sequences)
        ]


class NextToken(_LossOnly):
    """Cross-entropy of the next token, of those that count."""

    def __init__(self, router_share: float = 0.0) -> None:
        """`router_share` is what the loss of a mixture's routers counts, if the model tells it."""
        self._router_share = router_share

    def loss(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the sum over a micro-batch's targets, divided by the targets a micro-batch has.

        In training the routers' loss is added, as `transformers` does; what an evaluation tells is
        of the text alone.
        """
        logits = output.logits.flatten(0, 1).float()
        targets = batch["targets"].flatten()
        total = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
        mean: Tensor = total / batch["mean_targets"]
        routers: Tensor | None = getattr(output, "aux_loss", None)
        if routers is None or not torch.is_grad_enabled():
            return mean
        return mean + self._router_share * routers

    def inputs(self, batch: Batch) -> MicroBatch:
        """Return what the model's forward takes of a batch: `[S, T]` each, but all images in turn.

        Hugging Face's models see by places that begin again that another document begins, and mask
        attention accordingly, if they get no mask.
        """
        entries = {"input_ids": batch.inputs}
        if batch.documents is not None:
            entries["position_ids"] = places(batch.documents)
        if batch.images is not None:
            entries.update(batch.images.together())
        return entries

    def micro_batches(self, batch: Batch, sequences: int) -> list[MicroBatch]:
        rows = rows_of(batch, sequences)
        # Losses of micro-batches are averaged: their mean is then that over all targets.
        counted = int((batch.labels != IGNORED).sum())
        mean_targets = torch.tensor(max(counted, 1) / len(rows))
        parts = [batch.part(part) for part in rows]
        return [
            {**self.inputs(part), "targets": part.labels, "mean_targets": mean_targets}
            for part in parts
        ]


def rows_of(batch: Batch, sequences: int) -> list[slice]:
    """Return the rows of each micro-batch of so many sequences."""
    return [slice(row, row + sequences) for row in range(0, len(batch.inputs), sequences)]


class Hearing:
    """The listening of an `Objective`, whose loss calls `hear`."""

    def __init__(self) -> None:
        self._heard: list[Said] | None = None
        self._lock = threading.Lock()
        self._devices: list[int] = []
        """Which device each thing was heard from."""

    def hear(self, said: Tensor) -> None:
        """Keep what is said of a micro-batch's rows, `[B, ...]`, if somebody listens.

        Several devices may speak at the same time, each of micro-batches of its own in their order.
        """
        number = DEVICE_NUMBER.get()
        with self._lock:
            # Costs are found with tensors without data.
            if self._heard is not None and type(said) is Tensor:
                place = bisect_right(self._devices, number)
                self._devices.insert(place, number)
                # On a device that counts every byte what is kept must take none of it.
                on_host = said.device.type == "cpu"
                self._heard.insert(place, said.tolist() if on_host else said.detach())

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
    """Return what `Hearing.listening` gave as one tensor on the host, `[rows, ...]` float32."""
    return torch.cat([torch.as_tensor(part, dtype=torch.float32, device="cpu") for part in heard])
