"""The benchmark `swap` where both sides run each layer twice, and nothing is offloaded.

What offloading activations costs on the emulated device, where copies take turns with compute, does
not count here: the two sides do the same arithmetic, and differ in swapping parameters, gradients
and what travels between segments.
"""

from __future__ import annotations

import dataclasses

from atomtrain.benchmarks.common import Result, progress
from atomtrain.benchmarks.swap_pairs import SwapSetup, alternate, opened


def run(setup: SwapSetup, budget_bytes: int) -> Result:
    """Measure in pairs with resident training; return the keys of this part."""
    progress("every segment is recomputed on both sides")
    rate = setup.link_bytes_per_s
    with opened(setup, rate, budget_bytes, activations="recompute") as (engine, resident):
        plan = engine.plan
        setup = dataclasses.replace(setup, pairs=setup.recompute_pairs)
        measured = alternate(setup, engine, resident)
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
