"""Baselines of libraries: PyTorch's pipelines, and data parallelism, PyTorch's and swapped.

`LibraryStage` runs the pipeline schedules that come with PyTorch: one more candidate of the
pipeline. `SwappedParallel` is what a user would do without a swarm: each peer's engine accumulates
its gradients on its host, they are averaged as float32 among all peers over Gloo, and only then
updated. Averaging overlaps as much as the method allows: a block's begins as soon as its gradient
is on the host, while the layers before it are still computed, and several are under way at once, as
in `DistributedDataParallel`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.nn import functional as F

import atomtrain
from atombench.network.model import Batch, ModelSetup, fused_adamw
from atombench.network.pipeline import LIBRARY
from atomtrain.analysis.layers.chain import Layer
from atomtrain.engine.devices.streams import Event, Stream
from atomtrain.engine.engine import Engine
from atomtrain.models.gpt import Head

_BUCKET_MIB = 4


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


class DataParallel:
    """One rank with all memory, whose float32 gradients are averaged in every step by PyTorch."""

    def __init__(self, setup: ModelSetup) -> None:
        """Build the model; the process group must exist."""
        self.setup = setup
        self._net = nn.parallel.DistributedDataParallel(
            setup.model(), bucket_cap_mb=_BUCKET_MIB, gradient_as_bucket_view=True
        )
        self._optimizer = fused_adamw(self._net.parameters(), setup.learning_rate)

    def step(self, batches: Sequence[Batch]) -> float:
        """Run one step of all ranks, averaging in the last backward; return this rank's loss."""
        losses = []
        for batch in batches:
            last = batch is batches[-1]
            with contextlib.nullcontext() if last else self._net.no_sync():
                loss = self._net(**batch).loss
                (loss / len(batches)).backward()
            losses.append(float(loss.detach()))
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return sum(losses) / len(losses)


class SwappedParallel:
    """One rank's engine, whose gradients are the means of all ranks; a context that closes it."""

    def __init__(
        self,
        setup: ModelSetup,
        micro_batch: int,
        device_link_bytes_per_s: float,
        device_memory_bytes: int,
    ) -> None:
        """Open the engine; the process group must exist.

        Raises:
            PlanError: the model does not fit the budget.
        """
        example = setup.micro_batches(0, setup.sequences_per_peer, micro_batch)
        self._engine = atomtrain.swap(
            setup.model(),
            example[0],
            optimizer=lambda ps: fused_adamw(ps, setup.learning_rate),
            device=f"emulated:{int(device_link_bytes_per_s)}B/s",
            device_memory=device_memory_bytes,
            options=atomtrain.Options(micro_batches=len(example), optimizer_on_device=False),
        )
        self._averaging = Averaging(self._engine)

    def __enter__(self) -> SwappedParallel:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()
        self._averaging.close()

    def step(self, batches: Sequence[Batch]) -> float:
        """Run one step of all ranks; updates may go on. Return this rank's loss."""
        return self._engine.step(batches)

    def wait(self) -> None:
        """Block until the last step's gradients are averaged and its updates done."""
        self._engine.wait()


class Averaging:
    """Takes the mean of each block's gradients over all ranks, before the block's update."""

    def __init__(self, engine: Engine) -> None:
        """Average what the engine's steps make from now on."""
        # Collectives begin on the one and end on the other, so the next begins meanwhile.
        self._starting, self._ending = Stream("averaging"), Stream("averaged")
        engine.combine_gradients(self._combine)

    def close(self) -> None:
        """End the threads; the engine must be closed."""
        self._starting.close()
        self._ending.close()

    def _combine(self, gradient: torch.Tensor, complete: Sequence[Event]) -> Event:
        flat, works = gradient.view(torch.float32), list[Any]()

        def start() -> None:
            works.append(dist.all_reduce(flat, async_op=True))

        def end() -> None:
            works[0].wait()
            flat.div_(dist.get_world_size())

        return self._ending.submit(end, [self._starting.submit(start, complete)])
