"""Pipeline training over a slow network, at its best: one rank's part of a step.

Every rank holds some runs of layers (chunks) with their gradients and moments, resident. Transfers
never stop computation: receives are posted long before they are needed, sends run by themselves
until the step ends, and the order of operations (`simulation.pipeline`) may keep as many
micro-batches in flight as hide the way there and back. What travels has 32, 16 or 8 bits a value.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from atombench.network.model import Batch, ModelSetup, fused_adamw, run_layers
from atomresearch.simulation.pipeline import Op
from atomtrain.errors import ConfigError

WIRES = ("float32", "bfloat16", "int8")
"""Formats of activations and their gradients on the wire."""
LIBRARY = ("1F1B", "Interleaved1F1B")
"""PyTorch's own schedules by name (`baselines`); the second has several chunks a rank."""
_SCALE_BYTES = 4


def encoded_bytes(wire: str, rows: int, width: int) -> int:
    """Return the bytes of `[rows, width]` values on the wire."""
    if wire == "int8":
        return rows * (width + _SCALE_BYTES)
    return rows * width * (2 if wire == "bfloat16" else 4)


def encode(values: Tensor, wire: str) -> Tensor:
    """Return `[..., D]` float32 values as 1-D uint8; `int8` has one scale for each row of D."""
    rows = values.detach().reshape(-1, values.shape[-1])
    if wire == "float32":
        return rows.contiguous().view(torch.uint8).flatten()
    if wire == "bfloat16":
        return rows.to(torch.bfloat16).view(torch.uint8).flatten()
    if wire != "int8":
        raise ConfigError(f"there is no wire format {wire!r}; formats: {', '.join(WIRES)}")
    scale = rows.abs().amax(dim=1, keepdim=True).clamp_min_(1e-30).div_(127.0)
    levels = (rows / scale).round_().to(torch.int8).view(torch.uint8)
    return torch.cat([levels, scale.view(torch.uint8)], dim=1).flatten()


def decode(data: Tensor, wire: str, shape: Sequence[int]) -> Tensor:
    """Return float32 values of `shape` from what `encode` made."""
    if wire == "float32":
        return data.view(torch.float32).view(*shape).clone()
    if wire == "bfloat16":
        return data.view(torch.bfloat16).to(torch.float32).view(*shape)
    rows = data.view(-1, shape[-1] + _SCALE_BYTES)
    scale = rows[:, shape[-1] :].contiguous().view(torch.float32)
    levels = rows[:, : shape[-1]].view(torch.int8).to(torch.float32)
    return levels.mul_(scale).view(*shape)


class RankPlan(NamedTuple):
    """What one rank does in every step."""

    bounds: list[int]
    """Bounds of all chunks in the chain of layers."""
    order: list[Op]
    """This rank's operations."""
    micro_batch: int
    """Sequences in a micro-batch."""
    wire: str
    ahead: int
    """Receives that are posted before they are needed, and sends that may be under way."""
    recompute: bool
    """Keep only each chunk's input from forward to backward, and run forward again; the last chunk,
    whose backward follows at once, keeps everything."""

    @classmethod
    def of(cls, plan: Mapping[str, Any], rank: int) -> RankPlan:
        """Return a rank's part of what `Candidate.plan` gave, as JSON."""
        order = [Op(bool(backward), chunk, n) for backward, chunk, n in plan["orders"][rank]]
        return cls(
            plan["bounds"],
            order,
            plan["micro_batch"],
            plan["wire"],
            plan["ahead"],
            plan["recompute"],
        )


class Beside(NamedTuple):
    """What one of several pipelines needs to know of the others."""

    first_rank: int
    """Of this pipeline, in the process group of all."""
    same_stage: Any
    """The process group of the ranks that hold the same stage."""
    pipelines: int


class Stage:
    """One rank's chunks, trained step by step. All ranks must call `step` alike.

    `parameters` and `optimizer` are those of this rank's chunks only.
    """

    def __init__(
        self, setup: ModelSetup, plan: RankPlan, rank: int, ranks: int, beside: Beside | None = None
    ) -> None:
        """Build the chunks; the process group must exist if there are several ranks.

        Args:
            setup: The model.
            plan: What to do in a step.
            rank: This rank among those of its pipeline.
            ranks: Their number.
            beside: Other pipelines that train the same model with other samples; `None`: there are
                none.
        """
        self.setup, self.plan, self.rank, self.ranks = setup, plan, rank, ranks
        self.compute_s: list[float] = []
        """What the operations of each step so far took of a core."""
        self._beside = beside
        self._first_rank = beside.first_rank if beside else 0
        self.chunks = len(plan.bounds) - 1
        layers = setup.model().chain_layers()
        self._layers = {
            chunk: layers[plan.bounds[chunk] : plan.bounds[chunk + 1]]
            for chunk in range(rank, self.chunks, ranks)
        }
        self.parameters = [
            p for part in self._layers.values() for layer in part for p in layer.module.parameters()
        ]
        self.optimizer = fused_adamw(self.parameters, setup.learning_rate)
        self._shape = (plan.micro_batch, setup.sequence_tokens, setup.width)
        rows = plan.micro_batch * setup.sequence_tokens
        self._wire_bytes = encoded_bytes(plan.wire, rows, setup.width)

    def step(self, batches: Sequence[Batch]) -> float | None:
        """Run one optimizer step; return the mean loss where the last chunk is, else `None`."""
        run = self.compute(batches)
        if self._beside is not None:
            self._average(self._beside)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        run.finish()
        return sum(run.losses) / len(run.losses) if run.losses else None

    def compute(self, batches: Sequence[Batch]) -> _StepRun:
        """Run a step's operations, which leave their gradients in the parameters."""
        run = _StepRun(self, batches)
        started_s = time.thread_time()
        for op in self.plan.order:
            if op.backward:
                run.backward(op)
            else:
                run.forward(op)
        self.compute_s.append(time.thread_time() - started_s)
        return run

    def _average(self, beside: Beside) -> None:
        """Average the gradients with those of the other pipelines, as bfloat16."""
        running = []
        for part in self._layers.values():
            for layer in part:
                gradients = [p.grad for p in layer.module.parameters() if p.grad is not None]
                flat = torch.cat([g.flatten() for g in gradients]).to(torch.bfloat16)
                work = dist.all_reduce(flat, group=beside.same_stage, async_op=True)
                running.append((work, flat, gradients))
        for work, flat, gradients in running:
            work.wait()
            means = flat.to(torch.float32).div_(beside.pipelines)
            sizes = [g.numel() for g in gradients]
            for gradient, mean in zip(gradients, means.split(sizes), strict=True):
                gradient.copy_(mean.view_as(gradient))

    def neighbour(self, op: Op) -> int | None:
        """Return the rank that an operation's input comes from; `None`: it is already here."""
        if op.chunk == (self.chunks - 1 if op.backward else 0):
            return None
        source = (op.chunk + (1 if op.backward else -1)) % self.ranks
        return None if source == self.rank else source

    def tag(self, op: Op) -> int:
        """Return the number by which an operation's input is known on the wire."""
        return (op.micro_batch * self.chunks + op.chunk) * 2 + op.backward

    def receive(self, op: Op) -> tuple[Any, Tensor]:
        """Post the receive of an operation's input, which comes from another rank."""
        source = self.neighbour(op)
        assert source is not None
        buffer = torch.empty(self._wire_bytes, dtype=torch.uint8)
        return dist.irecv(buffer, src=self._first_rank + source, tag=self.tag(op)), buffer

    def send(self, op: Op, target: int, data: Tensor) -> Any:
        """Start sending an operation's input; returns what can be waited for."""
        return dist.isend(data, dst=self._first_rank + target, tag=self.tag(op))

    def run_chunk(self, chunk: int, hidden: Tensor | None, batch: Batch) -> Tensor:
        """Run a chunk's layers; returns the hidden state, or the loss."""
        layers = self._layers[chunk]
        values: dict[str, Any] = dict(batch)
        if hidden is not None:
            values[layers[0].reads[0]] = hidden
        out: Tensor = run_layers(layers, values)
        return out

    def decode(self, buffer: Tensor) -> Tensor:
        """Return what was received."""
        return decode(buffer, self.plan.wire, self._shape)


class _StepRun:
    """What one step keeps: posted receives, running sends, values between forward and backward."""

    def __init__(self, stage: Stage, batches: Sequence[Batch]) -> None:
        self.stage, self.batches = stage, batches
        self.losses: list[float] = []
        self._sends: deque[tuple[Any, Tensor]] = deque()
        self._local: dict[Op, Tensor] = {}
        self._kept: dict[tuple[int, int], tuple[Tensor | None, Tensor | None]] = {}
        self._from_others = [op for op in stage.plan.order if stage.neighbour(op) is not None]
        self._coming: dict[Op, tuple[Any, Tensor]] = {}
        self._posted = 0
        for _ in range(stage.plan.ahead):
            self._post()

    def forward(self, op: Op) -> None:
        hidden = None
        if op.chunk > 0:
            hidden = self._input(op).requires_grad_()
        last = op.chunk == self.stage.chunks - 1
        forget = self.stage.plan.recompute and not last
        with torch.set_grad_enabled(not forget):
            out = self.stage.run_chunk(op.chunk, hidden, self.batches[op.micro_batch])
        if last:
            self.losses.append(float(out.detach()))
            out = out / len(self.batches)
        else:
            self._pass(Op(False, op.chunk + 1, op.micro_batch), out)
        self._kept[op.chunk, op.micro_batch] = hidden, None if forget else out

    def backward(self, op: Op) -> None:
        hidden, out = self._kept.pop((op.chunk, op.micro_batch))
        last = op.chunk == self.stage.chunks - 1
        if out is None:
            out = self.stage.run_chunk(op.chunk, hidden, self.batches[op.micro_batch])
        torch.autograd.backward(out, None if last else self._input(op))
        if hidden is not None:
            assert hidden.grad is not None
            self._pass(Op(True, op.chunk - 1, op.micro_batch), hidden.grad)

    def finish(self) -> None:
        """Wait until everything that was sent has left."""
        for work, _ in self._sends:
            work.wait()

    def _post(self) -> None:
        """Post the next receive, in the order in which they are needed, if there is one left."""
        if self._posted < len(self._from_others):
            op = self._from_others[self._posted]
            self._coming[op] = self.stage.receive(op)
            self._posted += 1

    def _input(self, op: Op) -> Tensor:
        if op not in self._coming:
            return self._local.pop(op)
        work, buffer = self._coming.pop(op)
        self._post()
        work.wait()
        return self.stage.decode(buffer)

    def _pass(self, after: Op, values: Tensor) -> None:
        target = after.chunk % self.stage.ranks
        if target == self.stage.rank:
            self._local[after] = values.detach()
            return
        data = encode(values, self.stage.plan.wire)
        self._sends.append((self.stage.send(after, target, data), data))
        if len(self._sends) > self.stage.plan.ahead:
            # Sent so many operations ago that it has arrived, unless the step's order is no good.
            self._sends.popleft()[0].wait()


class DryStage(Stage):
    """A stage that receives zeros and sends nothing."""

    def receive(self, op: Op) -> tuple[Any, torch.Tensor]:
        return _Done(), torch.zeros(self._wire_bytes, dtype=torch.uint8)

    def send(self, op: Op, target: int, data: torch.Tensor) -> Any:
        return _Done()


def dry_stage(setup: ModelSetup, plan: dict[str, Any], rank: int, ranks: int) -> DryStage:
    """Return the stage of a rank among those of all pipelines."""
    stages = ranks // plan["pipelines"]
    return DryStage(setup, RankPlan.of(plan, rank % stages), rank % stages, stages)


def share_of_pipeline(setup: ModelSetup, plan: dict[str, Any], sequences: int) -> list[Batch]:
    """Return micro-batches of one pipeline's share of a step of so many sequences."""
    return setup.micro_batches(0, sequences // plan["pipelines"], plan["micro_batch"])


class _Done:
    def wait(self) -> None:
        """Nothing is to be waited for."""
