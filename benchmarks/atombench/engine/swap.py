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

import dataclasses
import statistics
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import torch

import atomtrain
from atombench.common import BenchmarkOptions, Result, description, progress
from atombench.engine.swap_pairs import (
    Block,
    Resident,
    SwapSetup,
    alternate,
    blocks_of,
    cores,
    model_of,
    opened,
    sizes_of,
    step_data,
    swapped_block,
    threads_of,
)
from atomtrain.engine.devices.host_memory import keep_freed
from atomtrain.engine.planner import Planner
from atomtrain.native import library
from atomtrain.optimizers import AdamW
from atomtrain.units import format_bytes

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
    update_pairs=3,
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
        **run_cases(setup, budget_bytes),
        **run_link(setup),
        **run_updates(setup),
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


def wider(setup: SwapSetup) -> SwapSetup:
    """Return the inputs of the case `wide`."""
    return dataclasses.replace(
        setup,
        width=setup.wide_width,
        micro_batches=setup.wide_micro_batches,
        pairs=setup.wide_pairs,
    )


def run_cases(setup: SwapSetup, budget_bytes: int) -> Result:
    """Measure under other conditions, each in pairs; return keys that begin with the case's name.

    - `recompute`: both sides run each layer twice, and nothing is offloaded. So they do the same
      arithmetic, and differ in swapping parameters, gradients and what travels between segments.
    - `all_threads`: compute has every core, on both sides, so copies and updates take turns with
      it. Thus the emulated device trains unless it is told otherwise; a GPU has engines for
      copying.
    - `wide`: the same with a wider model, under the same share of its state. What is done for each
      saved tensor and each of its bytes stays or grows with the width, arithmetic with its square.
    """
    recompute = dataclasses.replace(setup, pairs=setup.recompute_pairs)
    shared = dataclasses.replace(setup, pairs=setup.all_threads_pairs, threads=cores())
    wide = wider(setup)
    parameters, _, wide_budget_bytes = sizes_of(wide)
    return {
        "wide_parameters": parameters,
        **_case("wide", wide, wide_budget_bytes),
        **_case("recompute", recompute, budget_bytes, activations="recompute"),
        **_case("all_threads", shared, budget_bytes),
    }


def _case(name: str, setup: SwapSetup, budget_bytes: int, **options: Any) -> Result:
    progress(f"the case {name!r}")
    with opened(setup, setup.link_bytes_per_s, budget_bytes, **options) as (engine, resident):
        plan = engine.plan
        measured = alternate(setup, engine, resident)
    keys = measured.keys()
    return {
        f"{name}_speed_ratio": keys["speed_ratio"],
        f"{name}_speed_ratio_of_pairs": keys["speed_ratio_of_pairs"],
        f"{name}_step_s": keys["swapped_step_s"],
        f"{name}_resident_step_s": keys["resident_step_s"],
        f"{name}_processor_s": keys["processor_s"],
        f"{name}_resident_processor_s": keys["resident_processor_s"],
        f"{name}_link_wait_share": keys["link_wait_share"],
        f"{name}_device_peak_bytes": keys["device_peak_bytes"],
        f"{name}_device_budget_bytes": budget_bytes,
        f"{name}_bit_equal": measured.losses_equal,
        f"{name}_plan": plan.to_json(),
    }


def run_updates(setup: SwapSetup) -> Result:
    """Measure steps of few tokens in bfloat16 with 8-bit moments; return keys of this part.

    The model is that of the case `wide`. PyTorch's updates bound these steps, as they do larger
    ones where compute is as fast as a GPU's. Two engines train by turns, one by the compiled core,
    the other with the core turned off, and must end with the same losses.
    """
    setup = dataclasses.replace(
        wider(setup), sequence_tokens=setup.update_tokens, sequences=1, micro_batches=1
    )
    # As large a share of a state half as large.
    budget_bytes = sizes_of(setup).budget_bytes // 2
    progress(f"bound by updates: {setup.tokens_per_step} tokens a step")
    ways: dict[str, list[Block]] = {"compiled": [], "torch": []}
    with ExitStack() as stack:
        engines = {way: stack.enter_context(_narrow(setup, budget_bytes)) for way in ways}
        for pair in range(setup.warmup_steps + setup.update_pairs):
            steps = blocks_of(setup, setup.block_steps)
            for way in sorted(ways, reverse=pair % 2 == 1):
                with nullcontext() if way == "compiled" else _without_core():
                    ways[way].append(swapped_block(engines[way], steps))
        plan = engines["compiled"].plan
    equal = [b.losses for b in ways["compiled"]] == [b.losses for b in ways["torch"]]
    compiled, plain = (
        [block.step_s for block in blocks[setup.warmup_steps :]] for blocks in ways.values()
    )
    ratios = [slow / fast for fast, slow in zip(compiled, plain, strict=True)]
    return {
        "updates_core": library.core() is not None,
        "updates_tokens_per_step": setup.tokens_per_step,
        "updates_step_s": statistics.median(compiled),
        "updates_torch_step_s": statistics.median(plain),
        "updates_speed_ratio": statistics.median(ratios),
        "updates_speed_ratio_of_pairs": ratios,
        "updates_bit_equal": equal,
        "updates_plan": plan.to_json(),
    }


@contextmanager
def _narrow(setup: SwapSetup, budget_bytes: int) -> Iterator[atomtrain.Engine]:
    """Lend an engine in bfloat16 with exact masters, 8-bit moments and clipping."""
    torch.manual_seed(setup.seed)
    with (
        threads_of(setup.threads),
        atomtrain.swap(
            model_of(setup).to(torch.bfloat16),
            step_data(setup)[0],
            optimizer=lambda parameters: AdamW(parameters, lr=1e-4, state="int8", master="split"),
            device=f"emulated:{int(setup.link_bytes_per_s)}B/s",
            device_memory=budget_bytes,
            options=atomtrain.Options(clip_norm=1.0),
        ) as engine,
    ):
        yield engine


def _without_core() -> AbstractContextManager[object]:
    """Turn the compiled core off meanwhile: PyTorch does what it did."""
    return patch.object(library, "core", lambda: None)


_SLOWEST, _FASTEST = 1e5, 1e13
_HALVINGS = 40
_NEAR = 1.001


def balanced(planner: Planner, micro_batches: int) -> float:
    """Return the bytes a second at which the best plan loads for as long as it computes.

    Found by bisection: a faster link loads for a shorter time, computing stays.
    """
    slow, fast = _SLOWEST, _FASTEST
    for _ in range(_HALVINGS):
        middle = (slow * fast) ** 0.5
        machine = dataclasses.replace(
            planner.machine, load_bytes_per_s=middle, unload_bytes_per_s=middle
        )
        found = dataclasses.replace(planner, machine=machine).plan(micro_batches)
        if found.load_s > found.compute_s:
            slow = middle
        else:
            fast = middle
        if fast / slow < _NEAR:
            break
    return fast


def in_small_pieces(setup: SwapSetup) -> SwapSetup:
    """Return the inputs of this case: a deeper model, and micro-batches of one sequence."""
    return dataclasses.replace(
        setup,
        layers=setup.link_layers,
        sequences=1,
        micro_batches=setup.link_micro_batches,
        pairs=setup.link_pairs,
    )


def run_link(setup: SwapSetup) -> Result:
    """Measure on a link so slow that loading takes as long as computing; return keys of this part.

    There a step can take no less than the larger of the two: what resident training takes, and what
    the loaded bytes take. `link_bound_share` says how near to that bound a step is.

    Forward computes a third as long as backward for each byte that it loads. So it waits for the
    link while backward leaves the link idle, and no order of visits with two slots comes near the
    bound. Resident training gets the same micro-batches of one sequence. The model is deeper than
    that of the main case, under the same share of its state: each step ends with a block's gradient
    that leaves and its parameters that come back, while nothing computes, which is one part in so
    many as there are blocks.
    """
    setup = in_small_pieces(setup)
    parameters, _, budget_bytes = sizes_of(setup)
    with opened(setup, setup.link_bytes_per_s, budget_bytes) as (engine, _):
        rate = balanced(engine.planner, setup.micro_batches)
    progress(f"on a link of {format_bytes(rate)}/s loading takes as long as computing")
    with opened(setup, rate, budget_bytes) as (engine, resident):
        plan, machine = engine.plan, engine.planner.machine
        measured = alternate(setup, engine, resident)
    loading_s = plan.load_s * machine.load_bytes_per_s / rate
    bounds_s = [max(block.step_s, loading_s) for block in measured.resident]
    shares = [
        bound_s / block.step_s for bound_s, block in zip(bounds_s, measured.swapped, strict=True)
    ]
    return {
        "link_bound_share": statistics.median(shares),
        "link_bound_share_of_pairs": shares,
        "link_bound_bit_equal": measured.losses_equal,
        "link_bound_step_s": statistics.median(block.step_s for block in measured.swapped),
        "link_bound_resident_step_s": statistics.median(b.step_s for b in measured.resident),
        "link_bound_loading_s": loading_s,
        "link_bound_bytes_per_s": rate,
        "link_bound_predicted_share": max(plan.compute_s, plan.load_s) / plan.step_s,
        "link_bound_wait_s": statistics.median(block.wait_s for block in measured.swapped),
        "link_bound_parameters": parameters,
        "link_bound_micro_batches": setup.micro_batches,
        "link_bound_device_budget_bytes": budget_bytes,
        "link_bound_device_peak_bytes": measured.device_peak_bytes,
        "link_bound_plan": plan.to_json(),
    }
