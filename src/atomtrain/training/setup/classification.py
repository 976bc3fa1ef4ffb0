"""Of which class a text is: cross-entropy of a classifier's logits, `[B, classes]`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from atomtrain.data import Batch
from atomtrain.training.setup.hearing import Hearing, rows_heard
from atomtrain.training.setup.objective import MicroBatch, Said, rows_of


class Classification(Hearing):
    """Mean over texts; hears which of them were told right."""

    together = 1

    def loss(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the mean loss of a micro-batch's texts, 0-d float32, nats."""
        logits, classes = output.logits.float(), batch["row_labels"]
        self.hear((logits.argmax(1) == classes).float())
        return F.cross_entropy(logits, classes)

    def micro_batches(self, batch: Batch, sequences: int) -> list[MicroBatch]:
        """See `Objective`; in a batch without labels all texts are of the first class."""
        classes = batch.row_labels
        if classes is None:
            classes = torch.zeros(len(batch.inputs), dtype=torch.int64)
        return [
            {"input_ids": batch.inputs[part], "row_labels": classes[part]}
            for part in rows_of(batch, sequences)
        ]

    def numbers(
        self, heard: Sequence[Said], micro_batches: Sequence[MicroBatch]
    ) -> dict[str, float]:
        """Return the share of texts that were told right."""
        return {"accuracy": float(rows_heard(heard).mean())}
