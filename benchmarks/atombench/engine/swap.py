"""Swapped against resident training: what does it cost that the model does not fit?

Both train the same GPT on the same micro-batches with the same fused AdamW, alternating in one
process, and end with the same bits, which the benchmark checks.

What makes the comparison fair:

- *Same work.* The engine runs each layer forward, then again in backward, except those of its
  last segment, which run once, and those whose graphs wait for backward. The resident model
  checkpoints exactly the same layers, one by one, without the early stop of
  `torch.utils.checkpoint`, which would leave out each layer's last matrix product. What early
  stopping would gain the resident model is measured apart.
- *Same numbers.* The head is not tied to the embedding: of a tied weight the engine adds all of
  the head's gradients before the embedding's, the usual loop alternates, so the sums would be
  rounded differently with more than one micro-batch.
- *Same device.* The emulated device counts the memory of every operation, which a GPU's allocator
  does for nothing. So the resident model is counted in the same way; what it takes uncounted is
  measured apart. Both compute with the same threads: half of the cores, since the emulated device
  has no processor of its own, and a GPU does not compute on the cores that copy and update. What
  is left of the cores serves the engine only; the resident model has no use for it, as it has none
  beside a GPU. With every core for compute, on both sides, copies take turns with it: that is
  measured apart, too. Resident gradients are set to `None`, not filled.
- *Same memory.* The process keeps what it frees, as a GPU's allocator does (`heap_kept`): to get it
  from the system anew costs either side up to a fifth of a step, now and then.
- *Copies are real.* `processor_s` tells how long each of the engine's threads was at work in a
  step, `resident_processor_s` the same of the resident model's.
- *Nothing hidden, nothing charged to the other.* The engine's updates run in the background, into
  its next step. So the clock stops after `Engine.wait`: every update is paid for in the engine's
  own time. Waiting for the last of them counts as waiting for the link.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

import torch

import atomtrain
from atombench.common import BenchmarkOptions, Result, description, progress
from atombench.engine import swap_cases, swap_link
from atombench.engine.swap_pairs import (
    Resident,
    SwapSetup,
    alternate,
    blocks_of,
    opened,
    sizes_of,
)
from atomtrain.engine.devices.host_memory import keep_freed

_PAIRS = 3
"""Pairs by which the cost of counting is measured."""
QUICK = SwapSetup(
    layers=6,
    width=256,
    vocabulary=2048,
    sequence_tokens=128,
    sequences=1,
    pairs=5,
    recompute_pairs=3,
    all_threads_pairs=3,
    wide_width=512,
    wide_pairs=3,
    link_layers=6,
    link_pairs=3,
)


def run(options: BenchmarkOptions, setup: SwapSetup | None = None) -> Result:
    """Measure, and return the keys of the benchmarks' contract and the inputs.

    Args:
        options: `quick` chooses smaller inputs.
        setup: Inputs of one's own.

    Raises:
        PlanError: the model cannot be trained within its share of the budget.
    """
    heap_kept = keep_freed()
    setup = setup or (QUICK if options.quick else SwapSetup())
    parameters, state_bytes, budget_bytes = sizes_of(setup)
    with opened(setup, setup.link_bytes_per_s, budget_bytes) as (engine, resident):
        progress(engine.plan.describe())
        measured = alternate(setup, engine, resident)
        bit_equal = measured.losses_equal and _same_state(engine, resident)
        plan = engine.plan.to_json()
        # Last, because it trains the twin further.
        steps = blocks_of(setup, setup.block_steps)
        early_stop = resident.block(steps, early_stop=True)
        pairs = [
            (resident.block(steps, counted=False), resident.block(steps)) for _ in range(_PAIRS)
        ]
    return {
        "heap_kept": heap_kept,
        **swap_cases.run(setup, budget_bytes),
        **swap_link.run(setup),
        **measured.keys(),
        "device_budget_bytes": budget_bytes,
        "state_bytes": state_bytes,
        "tokens_per_step": setup.tokens_per_step,
        "bit_equal": bit_equal,
        "resident_early_stop_step_s": early_stop.step_s,
        "resident_counting_share": statistics.median(
            1 - uncounted.processor_s["compute"] / counted.processor_s["compute"]
            for uncounted, counted in pairs
        ),
        "parameters": parameters,
        "threads": setup.threads,
        "inputs": asdict(setup),
        "plan": plan,
        **description(),
    }


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
