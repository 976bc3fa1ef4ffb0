"""What parameters one update old would gain: predicted steps, exact and stale (`docs/engine.md`).

Nothing is measured and nothing is searched for: one layer a segment, times of data sheets, steps
laid out one after the other; for the least tokens of a step with which compute can cover the link
and the host (without clipping), and for more.
"""

from __future__ import annotations

from collections.abc import Mapping

from atomtrain.analysis.profile import LayerTime
from atomtrain.benchmarks.common import BenchmarkOptions, Result, description, progress
from atomtrain.planning.catalogue import gpu, host, machine_for
from atomtrain.planning.costing import Costing, Given, Steps
from atomtrain.planning.layout import Layout
from atomtrain.planning.machine import Machine
from atomtrain.planning.prospect import Analysis, covering_tokens
from atomtrain.planning.schedule import training_visits
from atomtrain.planning.shape import Shape
from atomtrain.reporting.place import compute_of
from atomtrain.reporting.subject import subject
from atomtrain.simulation.staleness import steady_step_s
from atomtrain.training.optimizing import named_optimizer, precision_of

CASES = (
    ("gpt3-xl", "rtx-3090", "fp32", 1),
    ("gpt3-6.7b", "h100", "bf16", 1),
    ("gpt3-13b", "rtx-4090", "bf16", 1),
)
"""Model, GPU, precision, sequences of a micro-batch."""
_HOST_BYTES = 512 << 30
_TIMES = (1, 2, 4)
"""Tokens of a step, by the least with which compute can cover the rest."""


def run(options: BenchmarkOptions) -> Result:
    """Predict every case; `rows` holds them."""
    rows: list[Result] = []
    for case in CASES[: 1 if options.quick else None]:
        progress(f"{case[0]} on {case[1]}")
        rows += _rows(*case)
    return {"rows": rows, "host_memory_bytes": _HOST_BYTES, **description()}


def _rows(model: str, card: str, precision: str, micro_batch: int) -> list[Result]:
    found = gpu(card)
    machine = machine_for(found, max(_HOST_BYTES, host(found.host).most_memory_bytes))
    trained = subject(model).trained_with(
        lambda owned: named_optimizer(owned, "adamw", precision), precision_of(precision)
    )
    analysis = trained.analyse(micro_batch)
    times = compute_of(found, precision).estimate(analysis)
    each = micro_batch * trained.context_tokens
    covering = covering_tokens(analysis, times, machine, each)
    rows = []
    for often in _TIMES:
        count = often * -(-covering // each)
        about = {"model": model, "gpu": card, "precision": precision, "tokens": count * each}
        rows.append({**about, **_gains(analysis, times, machine, count)})
    return rows


def _gains(
    analysis: Analysis, times: Mapping[str, LayerTime], machine: Machine, micro_batches: int
) -> Result:
    layers = len(analysis.chain.layers)
    shape = Shape(tuple(range(layers)), tuple(range(layers + 1)), 2, 2)
    steps = Steps(micro_batches=micro_batches, updates=analysis.updates)
    given = Given(chain=analysis.chain, costs=analysis.costs, times=times, machine=machine)
    costing = Costing(given, Layout(analysis.chain), steps)
    visits = training_visits(shape)
    of_visits = costing.visit_times(shape, visits)
    result: Result = {}
    for clips in (False, True):
        exact, stale = (
            steady_step_s(visits, of_visits, clips=clips, stale=late) for late in (False, True)
        )
        how = "clipped_" if clips else ""
        result |= {f"{how}exact_step_s": exact, f"{how}stale_step_s": stale}
        result[f"{how}gain"] = exact / stale - 1
    return result
