"""What bfloat16 with exact masters takes on the host, and how it learns, beside float32.

Two questions, each answered for every *kind* of state:

- *Memory*: a process of its own swaps a GPT, makes a few steps, and reads its resident set. What
  the emulated device holds is taken off, and what was there before (a tiny model has been trained,
  so that libraries are loaded); the rest, by the number of parameters, is what a parameter takes.
  It is compared with what the plan says. Norms are clipped, so that all gradients wait on the host;
  rows of `spent` are those without clipping, where gradients are spent at once.
- *Learning*: a small GPT is trained on the demonstration corpus as `atom train` does it, with the
  same batches for every kind, and evaluated on held-out text.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field

import torch

from atombench.common import BenchmarkOptions, Result, description, progress
from atombench.engine.plan import BenchmarkError
from atombench.engine.precision_memory import Kind, MemoryCase, precision_of
from atomtrain.data import (
    Prepared,
    Sampler,
    SamplerConfig,
    default_cache,
    held_out_batches,
    prepare,
    read_corpus,
)
from atomtrain.engine.api import swap
from atomtrain.engine.options import Options
from atomtrain.errors import ConfigError
from atomtrain.models import make_model
from atomtrain.training.config.new_recipe import make_optimizer, new_recipe
from atomtrain.training.config.optimizing import host_bytes_per_parameter
from atomtrain.training.config.options import TrainOptions
from atomtrain.units import format_bytes

_DEADLINE_S = 600.0
_EXACT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""What is freed goes back to the system at once, so that the resident set is what is held."""
_HELD_OUT_SEQUENCES = 64
_GRADIENT_BYTES = {"fp32": 4, "bf16": 2}


KINDS = {
    "fp32-16": Kind("fp32", "adamw"),
    "bf16-16": Kind("bf16", "adamw"),
    "bf16-14": Kind("bf16", "adamw-split"),
    "bf16-12": Kind("bf16", "adamw-bfloat16"),
    "bf16-10": Kind("bf16", "adamw-bfloat16-split"),
    "bf16-8": Kind("bf16", "adamw-int8"),
}
"""By precision and bytes of a parameter on the host."""


@dataclass(frozen=True, kw_only=True)
class PrecisionSetup:
    """Inputs of the benchmark."""

    memory: MemoryCase = field(default_factory=MemoryCase)
    learning_steps: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        if self.learning_steps < 1:
            raise ConfigError(f"learning_steps must be at least 1, not {self.learning_steps}")


QUICK = PrecisionSetup(memory=MemoryCase(layers=2, width=640), learning_steps=10)


def run(options: BenchmarkOptions, setup: PrecisionSetup | None = None) -> Result:
    """Measure, and return a row for each kind, and the inputs.

    Raises:
        DataError: the demonstration corpus is not installed.
        BenchmarkError: a process that measures memory failed.
    """
    setup = setup or (QUICK if options.quick else PrecisionSetup())
    recipe = new_recipe(TrainOptions(model="tiny", steps=setup.learning_steps, seed=setup.seed))
    text = prepare(read_corpus(None), default_cache(), vocabulary=recipe.sizes.vocabulary)
    rows: dict[str, Result] = {}
    spent: dict[str, Result] = {}
    for name, kind in KINDS.items():
        told_bytes = host_bytes_per_parameter(kind.optimizer, kind.precision)
        rows[name] = {
            "told_bytes_per_parameter": told_bytes,
            **_measured(kind, setup, spends=False),
            **learn(kind, setup, text),
        }
        spent[name] = {
            "told_bytes_per_parameter": told_bytes - _GRADIENT_BYTES[kind.precision],
            **_measured(kind, setup, spends=True),
        }
        progress(
            f"{name}: {rows[name]['measured_bytes_per_parameter']:.2f} bytes a parameter, "
            f"{format_bytes(rows[name]['measured_host_bytes'])} "
            f"({rows[name]['host_error_share']:+.1%} predicted), "
            f"{spent[name]['measured_bytes_per_parameter']:.2f} with gradients spent at once, "
            f"held-out bits per byte {rows[name]['held_out_bits_per_byte']:.4f}"
        )
    errors = [abs(row["host_error_share"]) for row in (*rows.values(), *spent.values())]
    return {
        "kinds": rows,
        "spent": spent,
        "largest_host_error_share": max(errors),
        "threads": torch.get_num_threads(),
        "inputs": asdict(setup),
        **description(),
    }


def learn(kind: Kind, setup: PrecisionSetup, text: Prepared) -> Result:
    """Train the small model; return the loss of each step and what held-out text gives at last."""
    options = TrainOptions(
        model="tiny", steps=setup.learning_steps, seed=setup.seed, **kind._asdict()
    )
    recipe = new_recipe(options)
    config = SamplerConfig(
        context_tokens=recipe.context, sequences=recipe.sequences, seed=recipe.seed
    )
    sampler = Sampler(text.tokens.train, config, "benchmark")
    torch.manual_seed(recipe.seed)
    model = make_model(recipe.sizes)
    losses = []
    with swap(
        model,
        _batch(sampler, 0),
        optimizer=lambda _: make_optimizer(model, recipe),
        device="emulated",
        device_memory="8MiB",
        options=Options(
            precision=precision_of(kind),
            clip_norm=recipe.clip_norm,
            profile=False,
        ),
    ) as engine:
        for step in range(recipe.steps):
            for group in engine.optimizer.param_groups:
                group["lr"] = recipe.learning_rate_at(step)
            losses.append(engine.step([_batch(sampler, step)]))
        held_out = [
            {"input_ids": batch.inputs, "labels": batch.labels}
            for batch in held_out_batches(
                text.tokens.held_out, recipe.context, recipe.sequences,
                _HELD_OUT_SEQUENCES // recipe.sequences,
            )
        ]  # fmt: skip
        loss = engine.evaluate(held_out)
    return {
        "losses": losses,
        "held_out_loss": loss,
        "held_out_bits_per_byte": text.tokens.held_out_bits_per_byte(loss),
    }


def _measured(kind: Kind, setup: PrecisionSetup, *, spends: bool) -> Result:
    order = {
        "kind": kind,
        "case": asdict(setup.memory),
        "threads": torch.get_num_threads(),
        "spends": spends,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "atombench.engine.precision_memory", json.dumps(order)],
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            env={**os.environ, **_EXACT_MEMORY},
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BenchmarkError(f"{kind} did not end within {_DEADLINE_S:g} s") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["it left no message"]
        raise BenchmarkError(f"the process of {kind} failed: {lines[-1]}")
    row: Result = json.loads(done.stdout.splitlines()[-1])
    return row


def _batch(sampler: Sampler, step: int) -> dict[str, torch.Tensor]:
    batch = sampler.batch(step)
    return {"input_ids": batch.inputs, "labels": batch.labels}
