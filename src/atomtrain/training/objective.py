"""What is learnt from a batch: its micro-batches, and the loss of a model's output.

A GPT computes its own loss. A Hugging Face model gets the loss from here, on the same logits and
targets as its own would be: the model's own shifts the targets by one, here they come shifted.
Targets of -100 do not count, and every target that does counts alike, in whichever micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from atomtrain.data import Batch
from atomtrain.models import HuggingFaceConfig, Sizes

IGNORED = -100
"""A target that does not count, as in Hugging Face's models."""
MicroBatch = dict[str, Tensor]


class Objective(Protocol):
    """Between batches and the engine."""

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


class OwnLoss:
    """The model takes labels and returns its loss."""

    loss = None

    def micro_batches(self, batch: Batch, sequences: int) -> list[MicroBatch]:
        """See `Objective`."""
        return [
            {"input_ids": batch.inputs[rows], "labels": batch.labels[rows]}
            for rows in _rows(batch, sequences)
        ]


class NextToken:
    """Cross-entropy of the next token, of those that count."""

    def loss(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the sum over a micro-batch's targets, divided by the targets a micro-batch has."""
        logits = output.logits.flatten(0, 1).float()
        targets = batch["targets"].flatten()
        total = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
        return total / batch["mean_targets"]

    def micro_batches(self, batch: Batch, sequences: int) -> list[MicroBatch]:
        """See `Objective`."""
        rows = _rows(batch, sequences)
        # Losses of micro-batches are averaged: their mean is then that over all targets.
        counted = int((batch.labels != IGNORED).sum())
        mean_targets = torch.tensor(max(counted, 1) / len(rows))
        return [
            {
                "input_ids": batch.inputs[part],
                "targets": batch.labels[part],
                "mean_targets": mean_targets,
            }
            for part in rows
        ]


def objective_of(sizes: Sizes) -> Objective:
    """Return what a model of these sizes learns from batches."""
    return NextToken() if isinstance(sizes, HuggingFaceConfig) else OwnLoss()


def _rows(batch: Batch, sequences: int) -> list[slice]:
    return [slice(row, row + sequences) for row in range(0, len(batch.inputs), sequences)]
