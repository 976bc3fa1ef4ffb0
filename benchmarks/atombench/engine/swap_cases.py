"""The benchmark `swap` under other conditions, each in pairs with resident training.

- `recompute`: both sides run each layer twice, and nothing is offloaded. So they do the same
  arithmetic, and differ in swapping parameters, gradients and what travels between segments.
- `all_threads`: compute has every core, on both sides, so copies and updates take turns with it.
  Thus the emulated device trains unless it is told otherwise; a GPU has engines for copying.
- `wide`: the same with a wider model, under the same share of its state. What is done for each
  saved tensor and each of its bytes stays or grows with the width, arithmetic with its square.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from atombench.common import Result, progress
from atombench.engine.swap_pairs import SwapSetup, alternate, cores, opened, sizes_of


def wider(setup: SwapSetup) -> SwapSetup:
    """Return the inputs of the case `wide`."""
    return dataclasses.replace(
        setup,
        width=setup.wide_width,
        micro_batches=setup.wide_micro_batches,
        pairs=setup.wide_pairs,
    )


def run(setup: SwapSetup, budget_bytes: int) -> Result:
    """Measure all cases; return their keys, which begin with their names."""
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
