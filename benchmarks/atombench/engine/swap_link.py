"""The benchmark `swap` on a link so slow that loading takes as long as computing.

There a step can take no less than the larger of the two: what resident training takes, and what
the loaded bytes take. `link_bound_share` says how near to that bound a step is.

Forward computes a third as long as backward for each byte that it loads. So it waits for the link
while backward leaves the link idle, and no order of visits with two slots comes near the bound.
Resident training gets the same micro-batches of one sequence. The model is deeper than that of the
main case, under the same share of its state: each step ends with a block's gradient that leaves and
its parameters that come back, while nothing computes, which is one part in so many as there are
blocks.
"""

from __future__ import annotations

import dataclasses
import statistics

from atombench.common import Result, progress
from atombench.engine.swap_pairs import SwapSetup, alternate, opened, sizes_of
from atomtrain.engine.planner import Planner
from atomtrain.units import format_bytes

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


def run(setup: SwapSetup) -> Result:
    """Measure in pairs with resident training; return the keys of this part."""
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
