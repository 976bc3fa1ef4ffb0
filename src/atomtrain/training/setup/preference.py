"""Direct preference optimization: of two answers, the better one is to become the more probable.

Rafailov et al. 2023 (arXiv 2305.18290), equation 7. With `s` the sum of the logarithms of an
answer's probabilities, `r` the same of the reference model, and `c`, `j` for chosen and rejected:

    rewards   beta * (s_c - r_c),  beta * (s_j - r_j)
    margin    beta * ((s_c - s_j) - (r_c - r_j)), the difference of the two
    loss      -log(sigmoid(margin)), the mean over pairs

Only `cross_entropy` touches the logits, so that the head can compute it in pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from atomtrain.data import Batch
from atomtrain.training.setup.objective import IGNORED, MicroBatch, Said, rows_of


class PreferredAnswer:
    """The loss of pairs of answers: rows `2 i` and `2 i + 1` of a micro-batch."""

    together = 2

    def __init__(self, beta: float) -> None:
        self._beta = beta
        self._heard: list[Said] | None = None

    def loss(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the mean loss of a micro-batch's pairs, 0-d float32."""
        logits, targets = output.logits.flatten(0, 1).float(), batch["targets"]
        losses = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="none")
        said = -losses.view(targets.shape).sum(1)  # [B]
        # Costs are found with tensors without data.
        if self._heard is not None and type(said) is Tensor:
            self._heard.append(_kept(said))
        return -F.logsigmoid(self.margins(said, batch["reference"])).mean()

    def margins(self, said: Tensor, reference: Tensor) -> Tensor:
        """Return `[B / 2]`, nats: the reward of each chosen answer less that of the other one.

        Args:
            said: `[B]`, the sums `s`.
            reference: `[B]`, the sums `r`.
        """
        chosen, rejected = (said - reference).view(-1, 2).unbind(1)
        return self._beta * (chosen - rejected)

    def micro_batches(self, batch: Batch, sequences: int) -> list[MicroBatch]:
        """See `Objective`; a batch without references is compared with zeros."""
        reference = batch.reference
        if reference is None:
            reference = torch.zeros(len(batch.inputs))
        return [
            {
                "input_ids": batch.inputs[part],
                "targets": batch.labels[part],
                "reference": reference[part],
            }
            for part in rows_of(batch, sequences)
        ]

    @contextmanager
    def listening(self) -> Iterator[list[Said]]:
        """Yield a list that gets the sums `s` of each micro-batch's rows, in order."""
        heard: list[Said] = []
        self._heard = heard
        try:
            yield heard
        finally:
            self._heard = None

    def numbers(
        self, heard: Sequence[Said], micro_batches: Sequence[MicroBatch]
    ) -> dict[str, float]:
        """Return the share of pairs with a margin above 0, and the mean margin, in nats.

        Args:
            heard: What `listening` gave.
            micro_batches: Those that were computed meanwhile.
        """
        reference = torch.cat([batch["reference"] for batch in micro_batches])
        margins = self.margins(sums_of(heard), reference)
        return {
            "reward_accuracy": float((margins > 0).float().mean()),
            "reward_margin": float(margins.mean()),
        }


def sums_of(heard: Sequence[Said]) -> Tensor:
    """Return what `PreferredAnswer.listening` gave as one tensor on the host, `[rows]` float32."""
    return torch.cat([torch.as_tensor(part, dtype=torch.float32, device="cpu") for part in heard])


def _kept(said: Tensor) -> Said:
    """Return numbers to keep: on a device that counts every byte they must take none of it."""
    return said.detach() if said.is_cuda else said.tolist()
