"""`atom bench curve`: a real model's loss in each step, by `atom train` and by the usual trainer.

SmolLM2-135M learns the demonstration corpus in float32, all of its weights and then adapters, by
the real command within a small device budget. `transformers.Trainer`, with `peft`'s adapters for
the latter, begins with the same weights and is given the same rows. With `--quick` a tiny random
model takes its place, which shows that all of it works and nothing else.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from atombench.common import BenchmarkOptions, Result, description, progress
from atombench.engine.finetune import atom, smollm_folder, tiny_folder
from atomtrain.checkpoint import open_checkpoint
from atomtrain.data.corpus import read_corpus
from atomtrain.data.sampler import Sampler, SamplerConfig
from atomtrain.data.tokens import prepare
from atomtrain.errors import ConfigError
from atomtrain.events import EVENTS_FILE, read_events
from atomtrain.files import default_cache
from atomtrain.training.config.optimizing import BETAS
from atomtrain.training.setup.state import recipe_of

_PACKAGES = ("transformers", "accelerate", "peft")
_LORA = "r=8,alpha=16"
_HARDLY = 1e-30
"""A learning rate that leaves adapters as they begin."""


class CurveSetup(NamedTuple):
    """What is trained, and how."""

    device_memory: str
    context: int = 128
    sequences: int = 2
    steps: int = 30
    learning_rate: float = 2e-4
    lora_learning_rate: float = 1e-3
    data: str | None = None
    """`None`: the demonstration corpus."""


_FULL = CurveSetup("640MiB")
_QUICK = CurveSetup("6MiB", context=32, sequences=4, learning_rate=2e-3, lora_learning_rate=1e-2)


def run(options: BenchmarkOptions) -> Result:
    """Measure; see the module."""
    if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"the usual trainer needs {', '.join(missing)}; pip install it")
    setup = _QUICK if options.quick else _FULL
    with tempfile.TemporaryDirectory(prefix="atom-curve-") as temporary:
        base = Path(temporary)
        folder = tiny_folder(base / "tiny") if options.quick else smollm_folder()
        curves = {}
        for name, train in (("full", _all_weights), ("lora", _adapters)):
            curves[name] = train(folder, base, setup)
            progress(f"{name}: losses differ by {_most_apart(*curves[name]):.2g} at most")
    result = description()
    result["versions"] |= {name: importlib.metadata.version(name) for name in _PACKAGES}
    result["inputs"] = {"model": folder.name, "lora": _LORA, **setup._asdict()}
    for name, (atoms, theirs) in curves.items():
        result |= {
            f"{name}_largest_difference": _most_apart(atoms, theirs),
            f"{name}_first_loss": atoms[0],
            f"{name}_last_loss": atoms[-1],
            f"{name}_losses": atoms,
            f"{name}_trainer_losses": theirs,
        }
    return result


def _most_apart(losses: list[float], others: list[float]) -> float:
    return max(abs(loss - other) for loss, other in zip(losses, others, strict=True))


def _all_weights(folder: Path, base: Path, setup: CurveSetup) -> tuple[list[float], list[float]]:
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    peer = _train("full", folder, base, setup)
    progress("the same by transformers.Trainer")
    model = load(folder, dtype=torch.float32)
    rate = setup.learning_rate
    return losses_of(peer), losses_of_trainer(model, peer, setup, rate, base / "trainer")


def _adapters(folder: Path, base: Path, setup: CurveSetup) -> tuple[list[float], list[float]]:
    """Compare adapters; `peft` begins with the run's: those of a run that has hardly learnt."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    rate = setup.lora_learning_rate
    adapted = setup._replace(learning_rate=rate)
    lora = ("--lora", _LORA)
    peer = _train("adapted", folder, base, adapted, *lora)
    begun = _train("begun", folder, base, setup._replace(learning_rate=_HARDLY, steps=1), *lora)
    atom("export", str(begun), str(base / "adapters"))
    progress("the same by transformers.Trainer and peft")
    frozen = load(folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(frozen, base / "adapters", is_trainable=True)
    return losses_of(peer), losses_of_trainer(model, peer, adapted, rate, base / "trainer")


def _train(run: str, folder: Path, base: Path, setup: CurveSetup, *more: str) -> Path:
    """Train by the command; return the peer's folder."""
    progress(f"atom train, {run}: {setup.steps} steps of {folder.name}")
    given = () if setup.data is None else ("--data", setup.data)
    atom(
        "train", "--model", str(folder), *given, "--directory", str(base), "--run", run,
        "--host", "127.0.0.1", "--device", "emulated:4GiB/s", "--no-profile", "--plain",
        "--device-memory", setup.device_memory, "--context", str(setup.context),
        "--sequences", str(setup.sequences), "--micro-batch", str(setup.sequences),
        "--steps", str(setup.steps), "--evaluate-every", "1000", "--checkpoint-every", "1000",
        "--precision", "fp32", "--learning-rate", str(setup.learning_rate),
        "--schedule", "constant", "--warmup-steps", "0", "--weight-decay", "0",
        "--check-model", "never", *more,
    )  # fmt: skip
    return base / run / "peer-0"


def losses_of(peer: Path) -> list[float]:
    """Return the loss of each step of a run."""
    steps = [event for event in read_events(peer / EVENTS_FILE) if event["event"] == "step"]
    return [float(step["loss"]) for step in steps]


def losses_of_trainer(
    model: Any, peer: Path, setup: CurveSetup, learning_rate: float, output: Path
) -> list[float]:
    """Train a model by `transformers.Trainer` on what a peer's run trained on.

    Args:
        model: As the run began; is trained.
        peer: The run's folder.
        setup: Of the run.
        learning_rate: Of every step.
        output: A folder for what the trainer writes.
    """
    rows = _rows(peer, setup)
    return losses_on(rows, model, setup.sequences, learning_rate, output)


def losses_on(
    rows: Sequence[Any],
    model: Any,
    micro_batch: int,
    learning_rate: float,
    output: Path,
    micro_batches: int = 1,
) -> list[float]:
    """Train a model by `transformers.Trainer` on rows in their order; return each step's loss.

    Args:
        rows: As many as all steps take.
        model: Is trained.
        micro_batch: Rows of one.
        learning_rate: Of every step.
        output: A folder for what the trainer writes.
        micro_batches: Of a step.
    """
    import transformers

    settings = transformers.TrainingArguments(
        output_dir=str(output), num_train_epochs=1, per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=micro_batches, learning_rate=learning_rate,
        lr_scheduler_type="constant", weight_decay=0.0, adam_beta1=BETAS[0], adam_beta2=BETAS[1],
        max_grad_norm=1.0, train_sampling_strategy="sequential", logging_steps=1, report_to=[],
        use_cpu=True, save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer: Any = transformers.Trainer(model=model, args=settings, train_dataset=rows)
    trainer.remove_callback(transformers.PrinterCallback)  # standard output is the result's
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _rows(peer: Path, setup: CurveSetup) -> Any:
    """Return the rows of a run's steps, in their order."""
    recipe, tokenizer = recipe_of(open_checkpoint(peer))
    text = read_corpus(setup.data)
    tokens = prepare(text, default_cache(), tokenizer=tokenizer).tokens
    config = SamplerConfig(
        context_tokens=setup.context, sequences=setup.sequences, seed=recipe.seed
    )
    sampler = Sampler(tokens.train, config, peer.name)
    rows: list[dict[str, torch.Tensor]] = []
    for step in range(setup.steps):
        batch = sampler.batch(step)
        whole = torch.cat([batch.inputs, batch.labels[:, -1:]], dim=1)  # the trainer's models shift
        rows += [{"input_ids": row, "labels": row} for row in whole]
    return rows
