"""Swapped and resident training of one model in turns, timed: what `atom bench swap` consists of.

The module `swap` says what makes the comparison fair.
"""

from __future__ import annotations

import copy
import os
import statistics
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import atomtrain
from atombench.common import Result, progress, require_positive
from atomtrain.analysis.costs.storages import StorageTracker
from atomtrain.models import GPT, GPTConfig

_STREAM = "atom-"
"""Begins the names of the engine's threads."""
MicroBatches = Sequence[Mapping[str, Tensor]]


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def _half_of_cores() -> int:
    return max(1, cores() // 2)


@dataclass(frozen=True, kw_only=True)
class SwapSetup:
    """Inputs of the benchmark."""

    layers: int = 8
    """Blocks of the GPT."""
    width: int = 512
    vocabulary: int = 4096
    sequence_tokens: int = 256
    sequences: int = 4
    """Sequences in a micro-batch."""
    micro_batches: int = 4
    """Micro-batches in a step."""
    state_per_budget: float = 4.0
    """Parameters, gradients and moments in multiples of the device budget; above 0."""
    link_bytes_per_s: float = 4.0 * 2**30
    """Emulated link, each direction."""
    threads: int = field(default_factory=_half_of_cores)
    """Threads that compute, on both sides; at least 1. Half of the cores: the emulated device has
    no processor of its own, and a GPU does not compute on the cores that copy and update."""
    pairs: int = 25
    """Pairs of one swapped and one resident block; at least 1."""
    block_steps: int = 1
    """Steps in a block; at least 1."""
    recompute_pairs: int = 5
    """Pairs in which both sides recompute every layer; at least 1."""
    all_threads_pairs: int = 7
    """Pairs in which both sides compute with all cores; at least 1."""
    wide_width: int = 1024
    """Width of the GPT that is nearer to those that people train."""
    wide_micro_batches: int = 2
    """Micro-batches in its step."""
    wide_pairs: int = 15
    """Pairs with it; at least 1."""
    link_pairs: int = 7
    """Pairs on the link on which loading takes as long as computing; at least 1."""
    link_layers: int = 16
    """Blocks of the GPT there."""
    link_micro_batches: int = 8
    """Micro-batches in a step there, each of one sequence."""
    update_pairs: int = 9
    """Pairs of steps bound by updates, by the compiled core and by PyTorch; at least 1."""
    update_tokens: int = 512
    """Tokens in their only sequence."""
    warmup_steps: int = 2
    """Steps of each before the first pair; at least 1."""
    seed: int = 0

    def __post_init__(self) -> None:
        require_positive(self)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all micro-batches."""
        return self.micro_batches * self.sequences * self.sequence_tokens


class Block(NamedTuple):
    """A timed block of steps."""

    step_s: float
    """Seconds a step, with its share of the wait at the end."""
    wait_s: float
    """Seconds a step of waiting for the link or for host updates."""
    losses: list[float]
    processor_s: Mapping[str, float]
    """Seconds a step of the processor's time: `compute` by the caller's thread, others by the
    engine's. Threads that operations share their work with do not count."""


class Resident:
    """The usual training loop, all in one memory."""

    def __init__(self, model: GPT, recomputed: Collection[int]) -> None:
        """Checkpoint the layers of the chain whose indices are `recomputed`."""
        self.model, self.layers, self.recomputed = model, model.chain_layers(), recomputed
        self.optimizer = fused_adamw(model.parameters())
        self._tracker = StorageTracker()

    def step(self, micro_batches: MicroBatches) -> float:
        """Run one step; return the mean loss."""
        self.optimizer.zero_grad(set_to_none=True)
        losses = []
        for micro_batch in micro_batches:
            loss = self._loss(micro_batch)
            (loss / len(micro_batches)).backward()
            losses.append(float(loss.detach()))
        self.optimizer.step()
        return sum(losses) / len(losses)

    def block(
        self, steps: Sequence[MicroBatches], *, early_stop: bool = False, counted: bool = True
    ) -> Block:
        """Run and time steps; with memory `counted` as on the emulated device."""
        counting = self._tracker if counted else nullcontext()
        with set_checkpoint_early_stop(early_stop), counting:
            used_s, started_s = time.thread_time(), time.perf_counter()
            losses = [self.step(step) for step in steps]
            step_s = (time.perf_counter() - started_s) / len(steps)
            processor_s = {"compute": (time.thread_time() - used_s) / len(steps)}
        return Block(step_s, 0.0, losses, processor_s)

    def _loss(self, micro_batch: Mapping[str, Tensor]) -> Tensor:
        values = dict(micro_batch)
        for index, layer in enumerate(self.layers):
            arguments = [values[name] for name in layer.reads]
            if index in self.recomputed:
                written = checkpoint(
                    layer.module, *arguments, use_reentrant=False, preserve_rng_state=False
                )
            else:
                written = layer.module(*arguments)
            values[layer.writes[0]] = written
        return values["loss"]


def fused_adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of both."""
    return torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.1, fused=True)


@contextmanager
def opened(
    setup: SwapSetup, link_bytes_per_s: float, budget_bytes: int, **options: Any
) -> Iterator[tuple[atomtrain.Engine, Resident]]:
    """Lend an engine, and resident training of the same model that recomputes the same layers.

    Raises:
        PlanError: the model cannot be trained within the budget.
    """
    torch.manual_seed(setup.seed)
    model = model_of(setup)
    twin = copy.deepcopy(model)
    with (
        threads_of(setup.threads),
        atomtrain.swap(
            model,
            step_data(setup)[0],
            optimizer=fused_adamw,
            device=f"emulated:{int(link_bytes_per_s)}B/s",
            device_memory=budget_bytes,
            options=atomtrain.Options(micro_batches=setup.micro_batches, **options),
        ) as engine,
    ):
        yield engine, Resident(twin, engine.plan.recomputed)


@contextmanager
def threads_of(count: int) -> Iterator[None]:
    """Compute with so many threads meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Measured(NamedTuple):
    """All blocks of a run, in pairs."""

    swapped: list[Block]
    resident: list[Block]
    device_peak_bytes: int
    losses_equal: bool

    def keys(self) -> Result:
        """Return the measured part of the result."""
        swapped_s = [block.step_s for block in self.swapped]
        resident_s = [block.step_s for block in self.resident]
        ratios = [r / s for r, s in zip(resident_s, swapped_s, strict=True)]
        return {
            "processor_s": _medians(self.swapped),
            "resident_processor_s": _medians(self.resident),
            "resident_step_s": statistics.median(resident_s),
            "swapped_step_s": statistics.median(swapped_s),
            "speed_ratio": statistics.median(ratios),
            "speed_ratio_of_pairs": ratios,
            "link_wait_share": sum(block.wait_s for block in self.swapped) / sum(swapped_s),
            "device_peak_bytes": self.device_peak_bytes,
        }


def _medians(blocks: Sequence[Block]) -> dict[str, float]:
    """Return the processor's time of each thread in a step."""
    return {
        name: statistics.median(block.processor_s[name] for block in blocks)
        for name in blocks[0].processor_s
    }


def alternate(setup: SwapSetup, engine: atomtrain.Engine, resident: Resident) -> Measured:
    """Run warm-up and pairs; which of the two comes first changes from pair to pair."""
    steps = blocks_of(setup, setup.warmup_steps)
    peak_bytes = 0
    equal = swapped_block(engine, steps).losses == resident.block(steps).losses
    swapped: list[Block] = []
    plain: list[Block] = []
    for pair in range(setup.pairs):
        steps = blocks_of(setup, setup.block_steps)
        if pair % 2 == 0:
            swapped.append(swapped_block(engine, steps))
            plain.append(resident.block(steps))
        else:
            plain.append(resident.block(steps))
            swapped.append(swapped_block(engine, steps))
        assert engine.last is not None
        peak_bytes = max(peak_bytes, engine.last.device_peak_bytes)
        equal = equal and swapped[-1].losses == plain[-1].losses
        progress(
            f"pair {pair + 1} of {setup.pairs}: swapped {swapped[-1].step_s:.3f} s, "
            f"resident {plain[-1].step_s:.3f} s a step"
        )
    return Measured(swapped, plain, peak_bytes, equal)


def swapped_block(engine: atomtrain.Engine, steps: Sequence[MicroBatches]) -> Block:
    """Run and time steps of the engine, all their updates included."""
    losses, wait_s = [], 0.0
    used_s = _processor_s()
    started_s = time.perf_counter()
    for step in steps:
        losses.append(engine.step(step))
        assert engine.last is not None
        wait_s += engine.last.link_wait_s
    stepped_s = time.perf_counter()
    engine.wait()
    ended_s = time.perf_counter()
    wait_s += ended_s - stepped_s
    processor_s = {
        name: (until_s - used_s[name]) / len(steps) for name, until_s in _processor_s().items()
    }
    return Block((ended_s - started_s) / len(steps), wait_s / len(steps), losses, processor_s)


def _processor_s() -> dict[str, float]:
    """Return the processor's time that this thread and those of streams have taken."""
    used_s = {"compute": time.thread_time()}
    for thread in threading.enumerate():
        if thread.name.startswith(_STREAM) and thread.ident is not None:
            clock = time.pthread_getcpuclockid(thread.ident)
            used_s[thread.name.removeprefix(_STREAM)] = time.clock_gettime(clock)
    return used_s


def model_of(setup: SwapSetup) -> GPT:
    """Return the GPT that both train."""
    heads = max(1, setup.width // 64)
    model = GPT(
        GPTConfig(
            layers=setup.layers,
            width=setup.width,
            heads=heads,
            head_width=setup.width // heads,
            vocabulary=setup.vocabulary,
            context=setup.sequence_tokens,
        )
    )
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())  # as `swap` says
    return model


class Sizes(NamedTuple):
    """Of the model and its training."""

    parameters: int
    state_bytes: int
    """Parameters, gradients and moments."""
    budget_bytes: int
    """On the device."""


def sizes_of(setup: SwapSetup) -> Sizes:
    """Return what model and budget follow from the inputs."""
    with torch.device("meta"):
        parameters = sum(p.numel() for p in model_of(setup).parameters())
    state_bytes = 4 * 4 * parameters
    return Sizes(parameters, state_bytes, int(state_bytes / setup.state_per_budget))


def step_data(setup: SwapSetup) -> list[dict[str, Tensor]]:
    """Return the random micro-batches of a step."""
    shape = (setup.sequences, setup.sequence_tokens + 1)
    batches = (torch.randint(setup.vocabulary, shape) for _ in range(setup.micro_batches))
    return [{"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]} for tokens in batches]


def blocks_of(setup: SwapSetup, steps: int) -> list[list[dict[str, Tensor]]]:
    """Return random steps."""
    return [step_data(setup) for _ in range(steps)]
