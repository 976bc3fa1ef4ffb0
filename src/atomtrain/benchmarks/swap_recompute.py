"""The benchmark `swap` where both sides run each layer twice, and nothing is offloaded.

What offloading activations costs on the emulated device, where copies take turns with compute, does
not count here: the two sides do the same arithmetic, and differ in swapping parameters, gradients
and what travels between segments.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics

import torch

import atomtrain
from atomtrain.benchmarks import swap
from atomtrain.benchmarks.common import Result, progress


def run(setup: swap.SwapSetup, budget_bytes: int) -> Result:
    """Measure in pairs with resident training; return the keys of this part."""
    progress("every segment is recomputed on both sides")
    torch.manual_seed(setup.seed)
    model = swap.model_of(setup)
    twin = copy.deepcopy(model)
    with atomtrain.swap(
        model,
        swap.step_data(setup)[0],
        optimizer=swap.fused_adamw,
        device=f"emulated:{int(setup.link_bytes_per_s)}B/s",
        device_memory=budget_bytes,
        options=atomtrain.Options(micro_batches=setup.micro_batches, activations="recompute"),
    ) as engine:
        plan = engine.plan
        resident = swap.Resident(twin, recomputed=plan.recomputed_layers)
        setup = dataclasses.replace(setup, pairs=setup.recompute_pairs)
        measured = swap.alternate(setup, engine, resident)
    ratios = [
        plain.step_s / swapped.step_s
        for plain, swapped in zip(measured.resident, measured.swapped, strict=True)
    ]
    return {
        "recompute_speed_ratio": statistics.median(ratios),
        "recompute_speed_ratio_of_pairs": ratios,
        "recompute_step_s": statistics.median(block.step_s for block in measured.swapped),
        "recompute_resident_step_s": statistics.median(b.step_s for b in measured.resident),
        "recompute_link_wait_share": sum(block.wait_s for block in measured.swapped)
        / sum(block.step_s for block in measured.swapped),
        "recompute_bit_equal": measured.losses_equal,
        "recompute_plan": plan.to_json(),
    }
