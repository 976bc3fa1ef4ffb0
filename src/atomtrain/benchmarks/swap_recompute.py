"""The benchmark `swap` where both sides run each layer twice, and nothing is offloaded.

What offloading activations costs on the emulated device, where copies take turns with compute, does
not count here: the two sides do the same arithmetic, and differ in swapping parameters, gradients
and what travels between segments.
"""

from __future__ import annotations

import copy
import dataclasses

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
    keys = measured.keys()
    return {
        "recompute_speed_ratio": keys["speed_ratio"],
        "recompute_speed_ratio_of_pairs": keys["speed_ratio_of_pairs"],
        "recompute_step_s": keys["swapped_step_s"],
        "recompute_resident_step_s": keys["resident_step_s"],
        "recompute_link_wait_share": keys["link_wait_share"],
        "recompute_bit_equal": measured.losses_equal,
        "recompute_plan": plan.to_json(),
    }
