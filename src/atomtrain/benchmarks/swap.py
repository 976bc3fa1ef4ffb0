"""Swapped against resident training: what does it cost that the model does not fit?

Both train the same GPT on the same micro-batches with the same fused AdamW, alternating in one
process, and end with the same bits, which the benchmark checks.

What makes the comparison fair:

- *Same work.* The engine runs each layer forward, then again in backward, except those of its
  last segment, which run once. The resident model checkpoints exactly the same layers, one by
  one, without the early stop of `torch.utils.checkpoint`, which would leave out each layer's
  last matrix product. What early stopping would gain the resident model is measured apart.
- *Same numbers.* The head is not tied to the embedding: of a tied weight the engine adds all of
  the head's gradients before the embedding's, the usual loop alternates, so the sums would be
  rounded differently with more than one micro-batch.
- *Same device.* The emulated device counts the memory of every operation, which a GPU's allocator
  does for nothing. So the resident model is counted in the same way; what it takes uncounted is
  measured apart. Both run with all threads; resident gradients are set to `None`, not filled.
- *Copies are real.* A GPU has engines for copying; the emulated device's copies take turns with
  compute on the same cores. `processor_s` tells how long each thread was at work in a step.
- *Nothing hidden, nothing charged to the other.* The engine's updates run in the background, into
  its next step. So the clock stops after blocks of several steps, and after
  `Engine.synchronize`: every update is paid for in the engine's own time. Waiting for the last
  update of a block counts as waiting for the link.
"""

from __future__ import annotations

import copy
import statistics
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import atomtrain
from atomtrain.analysis.storages import StorageTracker
from atomtrain.benchmarks.common import BenchmarkOptions, Result, description, progress
from atomtrain.errors import ConfigError
from atomtrain.models import GPT, GPTConfig

_PAIRS = 3
"""Pairs by which the cost of counting is measured."""
_STREAM = "atom-"
"""Begins the names of the engine's threads."""
MicroBatches = Sequence[Mapping[str, Tensor]]


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
    pairs: int = 15
    """Pairs of one swapped and one resident block; at least 1."""
    block_steps: int = 1
    """Steps in a block; at least 1."""
    recompute_pairs: int = 9
    """Pairs in which both sides recompute every layer; at least 1."""
    link_pairs: int = 5
    """Pairs on the link on which loading takes as long as computing; at least 1."""
    warmup_steps: int = 1
    """Steps of each before the first pair; at least 1."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "seed" and value <= 0:
                raise ConfigError(f"{name} must be positive, not {value}")

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all micro-batches."""
        return self.micro_batches * self.sequences * self.sequence_tokens


QUICK = SwapSetup(
    layers=6, width=256, sequences=1, pairs=3, block_steps=2, recompute_pairs=2, link_pairs=2
)


class Block(NamedTuple):
    """A timed block of steps."""

    step_s: float
    """Seconds a step, with its share of the final synchronisation."""
    wait_s: float
    """Seconds a step of waiting for the link or for host updates."""
    losses: list[float]
    processor_s: Mapping[str, float] = {}
    """Seconds a step of the processor's time by the engine's threads, `compute` the caller's own.
    Threads that operations share their work with do not count."""


class Resident:
    """The usual training loop, all in one memory."""

    def __init__(self, model: GPT, recomputed: int) -> None:
        """Checkpoint the first `recomputed` layers of the chain."""
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
            started_s = time.perf_counter()
            losses = [self.step(step) for step in steps]
            elapsed_s = time.perf_counter() - started_s
        return Block(elapsed_s / len(steps), 0.0, losses)

    def _loss(self, micro_batch: Mapping[str, Tensor]) -> Tensor:
        values = dict(micro_batch)
        for index, layer in enumerate(self.layers):
            arguments = [values[name] for name in layer.reads]
            if index < self.recomputed:
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


def run(options: BenchmarkOptions, setup: SwapSetup | None = None) -> Result:
    """Measure, and return the keys of the benchmarks' contract and the inputs.

    Args:
        options: `quick` chooses smaller inputs.
        setup: Inputs of one's own.

    Raises:
        PlanError: the model cannot be trained within its share of the budget.
    """
    from atomtrain.benchmarks import swap_link, swap_recompute  # they import this

    setup = setup or (QUICK if options.quick else SwapSetup())
    torch.manual_seed(setup.seed)
    model = model_of(setup)
    state_bytes = 4 * sum(p.numel() * p.element_size() for p in model.parameters())
    budget_bytes = int(state_bytes / setup.state_per_budget)
    twin = copy.deepcopy(model)
    with atomtrain.swap(
        model,
        step_data(setup)[0],
        optimizer=fused_adamw,
        device=f"emulated:{int(setup.link_bytes_per_s)}B/s",
        device_memory=budget_bytes,
        options=atomtrain.Options(micro_batches=setup.micro_batches),
    ) as engine:
        progress(engine.plan.describe())
        resident = Resident(twin, recomputed=engine.plan.recomputed_layers)
        measured = alternate(setup, engine, resident)
        bit_equal = measured.losses_equal and _same_state(engine, resident)
        plan, planner = engine.plan.to_json(), engine.planner
    # Last, because they train the twin further.
    steps = _blocks(setup, setup.block_steps)
    early_stop = resident.block(steps, early_stop=True)
    pairs = [(resident.block(steps, counted=False), resident.block(steps)) for _ in range(_PAIRS)]
    return {
        **swap_recompute.run(setup, budget_bytes),
        **swap_link.run(setup, planner),
        **measured.keys(),
        "device_budget_bytes": budget_bytes,
        "state_bytes": state_bytes,
        "tokens_per_step": setup.tokens_per_step,
        "bit_equal": bit_equal,
        "resident_early_stop_step_s": early_stop.step_s,
        "resident_counting_share": statistics.median(
            1 - uncounted.step_s / counted.step_s for uncounted, counted in pairs
        ),
        "parameters": sum(p.numel() for p in twin.parameters()),
        "threads": torch.get_num_threads(),
        "inputs": asdict(setup),
        "plan": plan,
        **description(),
    }


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
        threads = self.swapped[0].processor_s
        return {
            "processor_s": {
                name: statistics.median(block.processor_s[name] for block in self.swapped)
                for name in threads
            },
            "resident_step_s": statistics.median(resident_s),
            "swapped_step_s": statistics.median(swapped_s),
            "speed_ratio": statistics.median(ratios),
            "speed_ratio_of_pairs": ratios,
            "link_wait_share": sum(block.wait_s for block in self.swapped) / sum(swapped_s),
            "device_peak_bytes": self.device_peak_bytes,
        }


def alternate(setup: SwapSetup, engine: atomtrain.Engine, resident: Resident) -> Measured:
    """Run warm-up and pairs; which of the two comes first changes from pair to pair."""
    steps = _blocks(setup, setup.warmup_steps)
    peak_bytes = 0
    equal = _swapped_block(engine, steps).losses == resident.block(steps).losses
    swapped: list[Block] = []
    plain: list[Block] = []
    for pair in range(setup.pairs):
        steps = _blocks(setup, setup.block_steps)
        if pair % 2 == 0:
            swapped.append(_swapped_block(engine, steps))
            plain.append(resident.block(steps))
        else:
            plain.append(resident.block(steps))
            swapped.append(_swapped_block(engine, steps))
        assert engine.last is not None
        peak_bytes = max(peak_bytes, engine.last.device_peak_bytes)
        equal = equal and swapped[-1].losses == plain[-1].losses
        progress(
            f"pair {pair + 1} of {setup.pairs}: swapped {swapped[-1].step_s:.3f} s, "
            f"resident {plain[-1].step_s:.3f} s a step"
        )
    return Measured(swapped, plain, peak_bytes, equal)


def _swapped_block(engine: atomtrain.Engine, steps: Sequence[MicroBatches]) -> Block:
    losses, wait_s = [], 0.0
    used_s = _processor_s()
    started_s = time.perf_counter()
    for step in steps:
        losses.append(engine.step(step))
        assert engine.last is not None
        wait_s += engine.last.link_wait_s
    stepped_s = time.perf_counter()
    engine.synchronize()
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
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())  # see the module's text
    return model


def step_data(setup: SwapSetup) -> list[dict[str, Tensor]]:
    shape = (setup.sequences, setup.sequence_tokens + 1)
    batches = (torch.randint(setup.vocabulary, shape) for _ in range(setup.micro_batches))
    return [{"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]} for tokens in batches]


def _blocks(setup: SwapSetup, steps: int) -> list[list[dict[str, Tensor]]]:
    return [step_data(setup) for _ in range(steps)]


def _same_state(engine: atomtrain.Engine, resident: Resident) -> bool:
    """Compare parameters and moments byte by byte."""
    state, moments = engine.state_dict(), engine.optimizer_state()
    if not all(_same_bits(state[n], t) for n, t in resident.model.state_dict().items()):
        return False
    for name, parameter in resident.model.named_parameters():
        expected = resident.optimizer.state[parameter]
        if set(moments[name]) != set(expected):
            return False
        if not all(_same_bits(moments[name][key], expected[key]) for key in expected):
            return False
    return True


def _same_bits(left: Any, right: Any) -> bool:
    pair = [torch.as_tensor(value).detach().contiguous().reshape(-1) for value in (left, right)]
    same_kind = pair[0].dtype == pair[1].dtype
    return same_kind and torch.equal(pair[0].view(torch.uint8), pair[1].view(torch.uint8))
