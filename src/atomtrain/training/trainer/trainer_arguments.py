"""What `Trainer` is given: arguments, also of `transformers`, and samples for micro-batches."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from atomtrain.engine.options import check_compile
from atomtrain.errors import ConfigError
from atomtrain.optimizers import Schedule
from atomtrain.settings import number
from atomtrain.training.trainer.targets import inside_of

EPOCH = "epoch"
_SCHEDULES = {
    "linear": ("linear", 0.0),
    "cosine": ("cosine", 0.0),
    "constant": ("constant", 1.0),
    "constant_with_warmup": ("constant", 1.0),
}
"""Kind and last factor of transformers' schedules, by their name there."""
_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adamw_hf")
_ONLY_DEFAULT = {
    "auto_find_batch_size": False,
    "bf16_full_eval": False,
    "deepspeed": None,
    "eval_delay": 0,
    "eval_on_start": False,
    "fp16_full_eval": False,
    "fsdp": None,
    "group_by_length": False,
    "label_smoothing_factor": 0.0,
    "load_best_model_at_end": False,
    "lr_scheduler_kwargs": None,
    "optim_args": None,
    "optim_target_modules": None,
    "parallelism_config": None,
    "push_to_hub": False,
    "report_to": "none",
    "torch_compile_backend": "inductor",
    "torch_compile_mode": None,
    "train_sampling_strategy": "random",
    "use_liger_kernel": False,
}
"""What `Trainer` does not do: another value is refused, not ignored."""


@dataclass(frozen=True, kw_only=True)
class TrainerArguments:
    """How `Trainer` trains; every field has a working default."""

    output_dir: str | Path = "runs/trainer"
    """Folder of events, checkpoints and the final model."""
    micro_batch: int = 8
    """Samples of one forward call."""
    micro_batches: int = 1
    """Forward calls of one optimizer step."""
    epochs: float = 1.0
    """Passes over the data; above 0. `max_steps` counts more."""
    max_steps: int | None = None
    """Optimizer steps, or `None` for as many as the epochs have."""
    learning_rate: float = 5e-5
    """Peak."""
    schedule: str = "cosine"
    """Kind of `atomtrain.optimizers.Schedule`."""
    final_factor: float = 0.1
    """Learning rate of the last step as a part of the peak, 0 to 1."""
    warmup_steps: float = 0
    """Steps in which the learning rate rises; below 1: this part of all steps, rounded up."""
    weight_decay: float = 0.0
    layer_lr_decay: float = 1.0
    """By what a layer's learning rate is that of the layer above; above 0, at most 1."""
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    """What AdamW adds to the root of the second moment."""
    clip_norm: float | None = 1.0
    """Global gradient norm, clipped exactly; `None`: not clipped."""
    precision: str = "fp32"
    """`fp32`, `bf16` or `fp16`."""
    neftune_noise_alpha: float | None = None
    """Noise on the embeddings while training, such as 5; `None`: none."""
    evaluate_every: int | Literal["epoch"] | None = None
    """Steps between evaluations, `"epoch"`, or `None` for one at the end."""
    checkpoint_every: int | Literal["epoch"] | None = None
    """Steps between checkpoints, `"epoch"`, or `None` for one at the end."""
    log_every: int | Literal["epoch"] | None = None
    """Steps between lines on standard output, `"epoch"`, or `None` for none at all."""
    drop_unused: bool = False
    """Leave out those entries of samples that the model's forward does not name; where `Trainer`
    has a `loss`, which may use them, all stay."""
    seed: int = 42
    """Of the order of samples, and of dropout."""
    profile: bool | Literal["again"] = True
    """Measure this machine before the plan is made, or take what was measured before; `"again"`:
    measure it in any case; `False`: take figures from the catalogue."""
    compile: bool | Literal["auto"] = "auto"
    """Compile each kind of layer, as `Options` says; with `"auto"` a training that goes on from a
    checkpoint does as before, for the same bits."""

    def __post_init__(self) -> None:
        for name in ("micro_batch", "micro_batches", "max_steps", "evaluate_every",
                     "checkpoint_every", "log_every"):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, str) and not (value == EPOCH and name.endswith("_every")):
                raise ConfigError(f"{name} must be a whole number, not {value!r}")
            if value is not None and value != EPOCH and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        least = number(lambda value: 0 <= value < math.inf, "at least 0")
        least("warmup_steps", self.warmup_steps)
        least("neftune_noise_alpha", self.neftune_noise_alpha or 0)
        number(lambda value: value > 0, "above 0")("epochs", self.epochs)
        share = number(lambda value: 0 < value <= 1, "above 0 and at most 1")
        share("layer_lr_decay", self.layer_lr_decay)
        check_compile("compile", self.compile)
        if self.precision not in ("fp32", "bf16", "fp16"):
            raise ConfigError(f"precision must be fp32, bf16 or fp16, not {self.precision!r}")

    def schedule_of(self, steps: int) -> Schedule:
        """Return the learning rate's schedule in a run of so many steps."""
        warmup = self.warmup_steps
        warmup_steps = int(warmup) if warmup >= 1 else math.ceil(warmup * steps)
        return Schedule(
            kind=self.schedule,
            steps=steps,
            warmup_steps=min(warmup_steps, steps),
            final=self.final_factor,
        )


def arguments_from(given: Any) -> TrainerArguments:
    """Return `given`, or what `transformers.TrainingArguments` mean here.

    Raises:
        ConfigError: they are neither, or ask for something that would be done otherwise.
    """
    if given is None:
        return TrainerArguments()
    if isinstance(given, TrainerArguments):
        return given
    if not hasattr(given, "per_device_train_batch_size"):
        raise ConfigError(
            f"args must be atomtrain.TrainerArguments or transformers.TrainingArguments, not "
            f"{type(given).__name__}"
        )
    for name, usual in _ONLY_DEFAULT.items():
        if (value := getattr(given, name, usual)) not in (usual, None, "", [], {}):
            raise ConfigError(f"atomtrain.Trainer does not do {name}={value!r}; leave it out")
    optimizer = _text(given.optim)
    if optimizer not in _OPTIMIZERS:
        raise ConfigError(
            f"optim={optimizer!r} is not known here; use one of {', '.join(_OPTIMIZERS)}, or give "
            "Trainer an optimizer of your own"
        )
    kind = _text(given.lr_scheduler_type)
    if kind not in _SCHEDULES:
        raise ConfigError(
            f"lr_scheduler_type={kind!r} is not known here; use one of {', '.join(_SCHEDULES)}"
        )
    schedule, final = _SCHEDULES[kind]
    steps = given.max_steps if given.max_steps > 0 else None
    return TrainerArguments(
        output_dir=given.output_dir or "runs/trainer",
        micro_batch=given.per_device_train_batch_size,
        micro_batches=given.gradient_accumulation_steps,
        epochs=given.num_train_epochs,
        max_steps=steps,
        learning_rate=given.learning_rate,
        schedule=schedule,
        final_factor=final,
        warmup_steps=0 if kind == "constant" else given.warmup_steps,
        weight_decay=given.weight_decay,
        betas=(given.adam_beta1, given.adam_beta2),
        epsilon=given.adam_epsilon,
        clip_norm=given.max_grad_norm or None,
        precision="bf16" if given.bf16 else "fp16" if getattr(given, "fp16", False) else "fp32",
        evaluate_every=_every(given, "eval"),
        checkpoint_every=_every(given, "save"),
        log_every=_every(given, "logging"),
        neftune_noise_alpha=getattr(given, "neftune_noise_alpha", None),
        drop_unused=getattr(given, "remove_unused_columns", True),
        seed=given.seed,
        # False is only their default.
        compile=True if getattr(given, "torch_compile", False) else "auto",
    )


def _every(given: Any, what: str) -> int | Literal["epoch"] | None:
    """Return the steps between evaluations, checkpoints or lines, by their strategy."""
    strategy = _text(getattr(given, f"{what}_strategy", "no"))
    if strategy == EPOCH:
        return "epoch"
    if strategy == "no":
        return None
    if strategy != "steps":
        raise ConfigError(
            f"{what}_strategy={strategy!r} is not known here; use one of no, steps, epoch"
        )
    steps = getattr(given, f"{what}_steps", None)
    if steps is not None and not (steps >= 1 and float(steps).is_integer()):
        raise ConfigError(f"{what}_steps={steps} must be a whole number of steps here")
    return None if steps is None else int(steps)


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))


def stacked(samples: list[Any]) -> Any:
    """Return a micro-batch of samples: tensors stacked, mappings and tuples entry by entry.

    Raises:
        ConfigError: an entry is neither a tensor nor numbers, or has not the same shape in all
            samples.
    """
    return _stacked(samples, "samples")


def only(sample: Any, names: frozenset[str]) -> Any:
    """Return the entries of a mapping that have one of these names; anything else as it is."""
    if not isinstance(sample, Mapping):
        return sample
    return {name: value for name, value in sample.items() if name in names}


def tokens_in(batches: Iterable[Any]) -> int | None:
    """Return how many tokens micro-batches have, padding not counted; `None` without any.

    Args:
        batches: Mappings with `input_ids`, shaped (samples, context), and perhaps an
            `attention_mask` of that shape, in which padding is 0; others have no tokens.
    """
    tokens = 0
    for batch in batches:
        if not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), Tensor):
            return None
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape == ids.shape:
            tokens += int(mask.count_nonzero())
        else:
            tokens += ids.numel()
    return tokens


def names_in_forward(model: nn.Module) -> frozenset[str]:
    """Return the names of what a model's forward takes; of a wrapped one, what its inside takes."""
    return frozenset(inspect.signature(inside_of(model).forward).parameters)


def _stacked(samples: list[Any], what: str) -> Any:
    first = samples[0]
    if isinstance(first, Mapping):
        return {
            name: _stacked([sample[name] for sample in samples], f"{what}[{name!r}]")
            for name in first
        }
    if isinstance(first, tuple | list) and first and isinstance(first[0], Tensor):
        return tuple(
            _stacked([sample[i] for sample in samples], f"{what}[{i}]") for i in range(len(first))
        )
    try:
        return torch.stack([torch.as_tensor(sample) for sample in samples])
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"{what} cannot become one tensor ({reason}); leave out what the model does not take, "
            "pad or cut the rest to one length, or give Trainer a data_collator"
        ) from error
