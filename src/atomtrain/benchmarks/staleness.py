"""What updates that are one step late gain, and what they cost (`docs/engine.md`).

- *Predicted*: what `atom plan` says with and without them, for models and GPUs of the catalogue,
  clipped; for the least tokens of a step with which compute can cover link and host, and for more.
- *Measured*: exact and late steps of one model in turns, clipped, on the emulated device, whose
  link does not hold it up; one thread computes, so that the host has a core of its own to update
  with. Moments are of 8 bits, whose updates take the longest, as beside a GPU all of them do.
- *Learning*: a small GPT is trained on the demonstration corpus as `atom train` does it, with the
  same batches for both, and evaluated on held-out text.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

import atomtrain
from atomtrain.benchmarks.checks import require_positive
from atomtrain.benchmarks.common import BenchmarkOptions, Result, description, progress
from atomtrain.benchmarks.precision import PrecisionSetup, learn
from atomtrain.benchmarks.precision_memory import Kind
from atomtrain.benchmarks.swap_pairs import SwapSetup, blocks_of, model_of
from atomtrain.data import default_cache, prepare, read_corpus
from atomtrain.optimizers import AdamW
from atomtrain.planning.catalogue import gpu, host, machine_for
from atomtrain.planning.prospect import Workload, covering_tokens, prospect
from atomtrain.reporting.place import compute_of
from atomtrain.reporting.subject import subject
from atomtrain.training.optimizing import named_optimizer, precision_of
from atomtrain.training.options import TrainOptions
from atomtrain.training.recipe import new_recipe

CASES = (
    ("gpt3-xl", "rtx-3090", "fp32", 1),
    ("gpt3-6.7b", "h100", "bf16", 1),
    ("gpt3-13b", "rtx-4090", "bf16", 1),
)
"""Model, GPU, precision, sequences of a micro-batch."""
_HOST_BYTES = 512 << 30
_TIMES = (1, 2, 4)
"""Tokens of a step, by the least with which compute can cover the rest."""
_LINK_BYTES_PER_S = 32 << 30
_BUDGET_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class StalenessSetup:
    """Inputs of the benchmark."""

    layers: int = 8
    """Blocks of the GPT that is timed."""
    width: int = 512
    tokens: tuple[int, ...] = (64, 128, 256)
    """Of a step, in one sequence."""
    pairs: int = 7
    """Blocks of exact and late steps at each of them; at least 1."""
    block_steps: int = 4
    """Steps in a block; at least 1."""
    learning_steps: int = 400
    learning_seeds: int = 3

    def __post_init__(self) -> None:
        require_positive(self)


QUICK = StalenessSetup(
    layers=2, width=256, tokens=(32,), pairs=2, learning_steps=10, learning_seeds=1
)


def run(options: BenchmarkOptions, setup: StalenessSetup | None = None) -> Result:
    """Predict, measure and train; `rows`, `measured` and `learning` hold the results.

    Raises:
        DataError: the demonstration corpus is not installed.
    """
    setup = setup or (QUICK if options.quick else StalenessSetup())
    measured = [_measured(setup, tokens) for tokens in setup.tokens]
    learning = [_learned(setup, seed) for seed in range(setup.learning_seeds)]
    rows: list[Result] = []
    for case in CASES[: 1 if options.quick else None]:
        progress(f"{case[0]} on {case[1]}")
        rows += _predicted(*case)
    return {
        "rows": rows,
        "measured": measured,
        "learning": learning,
        "largest_gain": max(row["gain"] for row in measured),
        "held_out_ratio": statistics.median(row["held_out_ratio"] for row in learning),
        "host_memory_bytes": _HOST_BYTES,
        "inputs": asdict(setup),
        **description(),
    }


def _predicted(model: str, card: str, precision: str, micro_batch: int) -> list[Result]:
    found = gpu(card)
    machine = machine_for(found, max(_HOST_BYTES, host(found.host).most_memory_bytes))
    trained = subject(model).trained_with(
        lambda owned: named_optimizer(owned, "adamw", precision), precision_of(precision)
    )
    analysis, compute = trained.analyse(micro_batch), compute_of(found, precision)
    each = micro_batch * trained.context_tokens
    covering = covering_tokens(analysis, compute.estimate(analysis), machine, each)
    rows = []
    for often in _TIMES:
        tokens = often * -(-covering // each) * each
        workload = Workload(
            context_tokens=trained.context_tokens,
            tokens_per_step=tokens,
            micro_batch=micro_batch,
            clips=True,
        )
        exact, late = (
            prospect(trained.analyse, compute, machine, replace(workload, delays=delays)).plan
            for delays in (False, True)
        )
        rows.append(
            {
                "model": model,
                "gpu": card,
                "precision": precision,
                "tokens": tokens,
                "exact_step_s": exact.period_s,
                "late_step_s": late.period_s,
                "gain": exact.period_s / late.period_s - 1,
                "updated_on_device_blocks": len(exact.device_blocks),
            }
        )
    return rows


def _measured(setup: StalenessSetup, tokens: int) -> Result:
    """Return what blocks of steps take in turns, and what the plans said."""
    case = SwapSetup(
        layers=setup.layers, width=setup.width, sequences=1, micro_batches=1, sequence_tokens=tokens
    )
    torch.manual_seed(case.seed)
    model = model_of(case)
    models = {"exact": model, "late": copy.deepcopy(model)}
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ExitStack() as stack:
            engines = {
                name: stack.enter_context(_engine(one, case, delays=name == "late"))
                for name, one in models.items()
            }
            times: dict[str, list[float]] = {name: [] for name in engines}
            for pair in range(-1, setup.pairs):  # the first one warms up
                steps = blocks_of(case, setup.block_steps)
                for name in sorted(engines, reverse=bool(pair % 2)):
                    step_s = _block_s(engines[name], steps)
                    if pair >= 0:
                        times[name].append(step_s)
            gains = [a / b - 1 for a, b in zip(times["exact"], times["late"], strict=True)]
            told = {name: engine.plan.period_s for name, engine in engines.items()}
    finally:
        torch.set_num_threads(before)
    gain = statistics.median(gains)
    progress(f"{tokens} tokens a step: late updates gain {gain:.1%}")
    return {
        "tokens": tokens,
        "exact_step_s": statistics.median(times["exact"]),
        "late_step_s": statistics.median(times["late"]),
        "gain": gain,
        "gain_of_pairs": gains,
        "predicted_exact_step_s": told["exact"],
        "predicted_late_step_s": told["late"],
        "predicted_gain": told["exact"] / told["late"] - 1,
    }


def _engine(model: Any, case: SwapSetup, *, delays: bool) -> atomtrain.Engine:
    return atomtrain.swap(
        model,
        blocks_of(case, 1)[0][0],
        optimizer=lambda parameters: AdamW(parameters, lr=1e-4, state="int8"),
        device=f"emulated:{_LINK_BYTES_PER_S}B/s",
        device_memory=_BUDGET_BYTES,
        options=atomtrain.Options(
            clip_norm=1.0, delay_updates=delays, optimizer_on_device=False, host_layers=0
        ),
    )


def _block_s(engine: atomtrain.Engine, steps: Sequence[Any]) -> float:
    started_s = time.perf_counter()
    for step in steps:
        engine.step(step)
    engine.wait()
    return (time.perf_counter() - started_s) / len(steps)


def _learned(setup: StalenessSetup, seed: int) -> Result:
    """Return the losses of exact and late training from the same beginning on the same batches."""
    steps = setup.learning_steps
    recipe = new_recipe(TrainOptions(model="tiny", steps=steps, seed=seed))
    text = prepare(read_corpus(None), default_cache(), vocabulary=recipe.sizes.vocabulary)
    learning = PrecisionSetup(learning_steps=steps, seed=seed)
    kind = Kind("fp32", "adamw")
    exact, late = (learn(kind, learning, text, delays=delays) for delays in (False, True))
    ratio = late["held_out_bits_per_byte"] / exact["held_out_bits_per_byte"]
    progress(f"seed {seed}: held-out bits per byte of late updates {ratio:.4f} of those of exact")
    return {"seed": seed, "exact": exact, "late": late, "held_out_ratio": ratio}
