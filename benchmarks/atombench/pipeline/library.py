"""The pipeline schedules that come with PyTorch, as one more candidate of the baseline."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.nn import functional as F

from atombench.network.model import Batch, ModelSetup, fused_adamw
from atombench.pipeline.pipeline import LIBRARY
from atomtrain.analysis.layers.chain import Layer
from atomtrain.models.gpt import Head


class _Chunk(nn.Module):
    """A run of layers whose inputs and outputs travel as bfloat16, and so do their gradients."""

    def __init__(self, layers: Sequence[Layer], first: bool, last: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(layer.module for layer in layers)
        self.first, self.last = first, last

    def forward(self, given: Tensor) -> Tensor:
        value = given if self.first else given.to(torch.float32)
        for part in self.parts:
            value = part.logits(value) if isinstance(part, Head) else part(value)
        return value if self.last else value.to(torch.bfloat16)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class LibraryStage:
    """One rank's chunks under one of PyTorch's schedules."""

    def __init__(self, setup: ModelSetup, plan: dict[str, Any], rank: int, ranks: int) -> None:
        """`plan` has `schedule`, `bounds`, `micro_batch` and `micro_batches`."""
        bounds = plan["bounds"]
        chunks = len(bounds) - 1
        layers = setup.model().chain_layers()
        tokens = (plan["micro_batch"], setup.sequence_tokens)
        ids = torch.zeros(tokens, dtype=torch.int64)
        hidden = torch.zeros(*tokens, setup.width, dtype=torch.bfloat16).requires_grad_()
        logits = torch.zeros(*tokens, setup.vocabulary).requires_grad_()
        stages = []
        for chunk in range(rank, chunks, ranks):
            first, last = chunk == 0, chunk == chunks - 1
            module = _Chunk(layers[bounds[chunk] : bounds[chunk + 1]], first, last)
            stages.append(
                PipelineStage(
                    module,
                    chunk,
                    chunks,
                    torch.device("cpu"),
                    input_args=(ids if first else hidden,),
                    output_args=(logits if last else hidden,),
                )
            )
        count = plan["micro_batches"]
        self._schedule: Any
        if plan["schedule"] == LIBRARY[0]:
            self._schedule = Schedule1F1B(stages[0], count, loss_fn=_loss)
        else:
            self._schedule = ScheduleInterleaved1F1B(list(stages), count, loss_fn=_loss)
        self.compute_s: list[float] = []
        """What the schedule's operations of each step so far took of a core."""
        self._first = rank == 0
        self._last = (chunks - 1) % ranks == rank
        self.optimizer = fused_adamw(
            (p for s in stages for p in s.submod.parameters()), setup.learning_rate
        )

    def step(self, batches: Sequence[Batch]) -> float | None:
        """Run one optimizer step; return the mean loss where the last chunk is, else `None`."""
        given = [torch.cat([batch["input_ids"] for batch in batches])] if self._first else []
        losses: list[Tensor] = []
        started_s = time.thread_time()
        if self._last:
            labels = torch.cat([batch["labels"] for batch in batches])
            self._schedule.step(*given, target=labels, losses=losses, return_outputs=False)
        else:
            self._schedule.step(*given, return_outputs=False)
        self.compute_s.append(time.thread_time() - started_s)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(torch.stack(losses).mean().detach()) if losses else None
