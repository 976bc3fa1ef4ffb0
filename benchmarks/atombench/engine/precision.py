"""What bfloat16 with exact masters takes on the host, and how it learns, beside float32.

Two questions, each answered for every *kind* of state:

- *Memory*: a process of its own swaps a GPT, makes a few steps, and reads its resident set. What
  the emulated device holds is taken off, and what was there before (a tiny model has been trained,
  so that libraries are loaded); the rest, by the number of parameters, is what a parameter takes.
  It is compared with what the plan says. Norms are clipped, so that all gradients wait on the host;
  rows of `spent` are those without clipping, where gradients are spent at once.
- *Learning*: a small GPT is trained on the demonstration corpus as `atom train` does it, with the
  same batches for every kind, and evaluated on held-out text.

`python -m atombench.engine.precision JSON` is that process: it prints one JSON object.
"""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from atombench.common import BenchmarkOptions, Result, description, progress, require_positive
from atombench.engine.apart import EXACT_MEMORY, measured_apart, memory_bytes
from atomtrain.data.corpus import read_corpus
from atomtrain.data.sampler import Sampler, SamplerConfig, held_out_batches
from atomtrain.data.tokens import Prepared, prepare
from atomtrain.engine.api import swap
from atomtrain.engine.devices.host_memory import give_back
from atomtrain.engine.engine import Engine
from atomtrain.engine.options import Options
from atomtrain.errors import ConfigError
from atomtrain.files import default_cache
from atomtrain.models import GPT, GPTConfig, make_model
from atomtrain.training.config.new_recipe import make_optimizer, new_recipe
from atomtrain.training.config.optimizing import host_bytes_per_parameter
from atomtrain.training.config.options import TrainOptions
from atomtrain.units import format_bytes

_STEPS = 2
_CLIP_NORM = 1.0
_HEAD_WIDTH = 64


class Kind(NamedTuple):
    """How parameters, gradients and state are stored."""

    precision: str
    optimizer: str


@dataclass(frozen=True, kw_only=True)
class MemoryCase:
    """The GPT whose memory is measured."""

    layers: int = 16
    width: int = 1024
    """A multiple of 64. Large enough that what does not grow with the model, such as scratch,
    makes less than a hundredth."""
    vocabulary: int = 8192
    context: int = 16
    """Tokens of a sequence; few, since only memory is looked at."""
    device_memory: str = "192MiB"

    def __post_init__(self) -> None:
        require_positive(self)


def measure(kind: Kind, case: MemoryCase, *, spends: bool = False) -> Result:
    """Train in this process; return what the host holds afterwards, and what was predicted.

    The global norm is clipped, so that all gradients wait on the host, unless it `spends` them.
    """
    # What libraries load and keep is there before the case begins.
    _trained(kind, MemoryCase(layers=2, width=64, vocabulary=64), spends=spends).close()
    gc.collect()
    give_back()
    before_bytes = memory_bytes()
    engine = _trained(kind, case, spends=spends)
    engine.synchronize()
    gc.collect()
    give_back()  # holes that the device's activations left in the heap are nobody's
    grown_bytes = memory_bytes() - before_bytes
    # A new peak begins with what is there.
    engine.device.reset_peak()
    device_bytes = engine.device.peak_bytes()
    host_bytes = grown_bytes - device_bytes
    result = {
        "parameters": engine.parameters,
        "measured_host_bytes": host_bytes,
        "predicted_host_bytes": engine.plan.host_bytes,
        "host_error_share": engine.plan.host_bytes / host_bytes - 1,
        "measured_bytes_per_parameter": host_bytes / engine.parameters,
        "device_bytes": device_bytes,
    }
    engine.close()
    return result


def precision_of(kind: Kind) -> Literal["bf16"] | None:
    """Return what the engine calls the precision."""
    return "bf16" if kind.precision == "bf16" else None


def _trained(kind: Kind, case: MemoryCase, *, spends: bool) -> Engine:
    recipe = new_recipe(TrainOptions(model="tiny", **kind._asdict()))
    torch.manual_seed(0)
    model = GPT(
        GPTConfig(
            layers=case.layers,
            width=case.width,
            heads=max(1, case.width // _HEAD_WIDTH),
            head_width=_HEAD_WIDTH,
            vocabulary=case.vocabulary,
            context=case.context,
        )
    )
    engine = swap(
        model,
        _batch(case),
        optimizer=lambda _: make_optimizer(model, recipe),
        device="emulated",
        device_memory=case.device_memory,
        options=Options(
            precision=precision_of(kind),
            clip_norm=None if spends else _CLIP_NORM,
            spend_gradients=spends,
            profile=False,
        ),
    )
    for _ in range(_STEPS):
        engine.step([_batch(case)])
    return engine


def _batch(case: MemoryCase) -> dict[str, Tensor]:
    tokens = torch.randint(case.vocabulary, (1, case.context + 1))
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def main() -> None:
    """Measure one kind as the command line says."""
    order: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(order["threads"])
    case = MemoryCase(**order["case"])
    result = measure(Kind(*order["kind"]), case, spends=order["spends"])
    sys.stdout.write(json.dumps({**result, "case": asdict(case)}) + "\n")


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
        _learning_batch(sampler, 0),
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
            losses.append(engine.step([_learning_batch(sampler, step)]))
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
    return measured_apart("atombench.engine.precision", order, kind, EXACT_MEMORY)


def _learning_batch(sampler: Sampler, step: int) -> dict[str, torch.Tensor]:
    batch = sampler.batch(step)
    return {"input_ids": batch.inputs, "labels": batch.labels}


if __name__ == "__main__":
    main()
