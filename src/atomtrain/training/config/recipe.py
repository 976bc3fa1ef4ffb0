"""The recipe: everything that decides what is trained, resolved and serialisable.

It travels in checkpoints and in the swarm's manifest, so that resuming and joining need no options.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from atomtrain.errors import CheckpointError, ConfigError
from atomtrain.models.gpt_config import preset
from atomtrain.models.hugging_face import (
    check_context,
    is_hugging_face,
    model_folder,
    read_config,
)
from atomtrain.models.lora_config import LoraConfig, parse_lora
from atomtrain.models.making import Sizes, sizes_from_json
from atomtrain.optimizers import Schedule
from atomtrain.training.config.optimizing import (
    check_gradient_dtype,
    check_optimizer,
    check_precision,
    named_optimizer,
    train_alike,
)
from atomtrain.training.config.options import TrainOptions

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

FORMAT = 1
_FINE_TUNING_CONTEXT = 1024
USUAL_BETA = 0.1
_MOST = 2**63 - 1
_LEAST = {
    "context": 1, "sequences": 1, "steps": 0, "warmup_steps": 0, "seed": 0, "local_steps": 0,
    "evaluate_every": 1, "checkpoint_every": 1,
}  # fmt: skip
_SMALL = ("demo", "tiny")
"""Models that train in minutes on two CPU cores; with little text, more small steps do better."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is trained, and how."""

    model: str
    """Name of the preset, or of the folder or id of a Hugging Face model."""
    sizes: Sizes
    """The model's sizes; the tokenizer has at most `vocabulary` tokens."""
    context: int
    """Tokens of a sequence."""
    sequences: int
    """Sequences of one step."""
    steps: int
    """Optimizer steps of each peer."""
    learning_rate: float
    """Peak."""
    warmup_steps: int
    """Steps in which the learning rate rises linearly from 0."""
    weight_decay: float
    clip_norm: float
    """Global norm to which gradients are clipped; 0: not at all."""
    seed: int
    local_steps: int
    """Steps in which every part of the model is averaged with other peers once; 0: as few as the
    link allows."""
    evaluate_every: int
    checkpoint_every: int
    optimizer: str = "adamw"
    """Name of one of `atomtrain.training.config.optimizing`."""
    schedule: str = "cosine"
    """Kind of `Schedule`; all but `constant` end at a tenth of the peak."""
    packed: bool = False
    """Whether a sequence may hold several rows of data with answers; neither they nor documents of
    running text see each other then."""
    lora: LoraConfig | None = None
    """Adapters that are trained in place of the model."""
    precision: str = "fp32"
    """`fp32`, or `bf16` or `fp16`: parameters of 16 bits with float32 masters."""
    gradient_dtype: str | None = None
    """`float32`: gradients of parameters of 16 bits add up in 32; `None`: in the parameters' type.
    """
    objective: str = "next-token"
    """`next-token`, or `dpo`: to prefer the better of two answers."""
    beta: float = USUAL_BETA
    """Of `dpo`: how strongly the model is held to what it was."""

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_objective()
        check_optimizer(self.optimizer)
        check_precision(self.precision, self.optimizer)
        check_gradient_dtype(self.gradient_dtype)
        self._schedule()

    @property
    def in_pairs(self) -> bool:
        """Whether sequences come in twos: a better and another answer."""
        return self.objective == "dpo"

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step of one peer."""
        return self.sequences * self.context

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of step `step`, counted from 0.

        By default linear warm-up, then a cosine to a tenth of the peak (Hoffmann et al. 2022,
        section 3).
        """
        return self.learning_rate * self._schedule()(step)

    def _schedule(self) -> Schedule:
        # A run that is resumed may have fewer steps than its warm-up.
        warmup_steps = min(self.warmup_steps, self.steps)
        return Schedule(kind=self.schedule, steps=self.steps, warmup_steps=warmup_steps, final=0.1)

    def _check_numbers(self) -> None:
        """Refuse what no run has: a recipe may come from a founder."""
        for name, least in _LEAST.items():
            number = getattr(self, name)
            if not isinstance(number, int) or not least <= number <= _MOST:
                raise ConfigError(
                    f"{name} must be a whole number from {least} to {_MOST}, not {str(number)[:40]}"
                )
        for name in ("learning_rate", "weight_decay", "clip_norm", "beta"):
            number = getattr(self, name)
            if not isinstance(number, int | float) or not 0 <= number < math.inf:
                raise ConfigError(f"{name} must be a number from 0 on, not {str(number)[:40]}")

    def _check_objective(self) -> None:
        if not self.in_pairs:
            return
        if self.sequences % 2:
            raise ConfigError(
                f"--sequences {self.sequences} is odd, but with --objective dpo every pair takes "
                "two; give an even number"
            )
        if self.packed:
            raise ConfigError(
                "--packing puts several rows into one sequence, but with --objective dpo every "
                "answer has its own; leave it out"
            )

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Recipe:
        """Read what `to_json` wrote.

        Raises:
            CheckpointError: of another format, or not a recipe.
        """
        try:
            fields = dict(data)
            if (found := fields.pop("format")) != FORMAT:
                raise CheckpointError(
                    f"the recipe has format {found}, this version reads {FORMAT}; "
                    "use the version of atomtrain that wrote it"
                )
            if fields.get("lora") is not None:
                fields["lora"] = LoraConfig.from_json(fields["lora"])
            return cls(**{**fields, "sizes": sizes_from_json(fields["sizes"])})
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"not a recipe of atomtrain: {error}") from error


def new_recipe(options: TrainOptions) -> Recipe:
    """Return the recipe of a new run.

    Raises:
        ConfigError: unknown model, optimizer, schedule or precision, or options that contradict
            each other.
    """
    name = model_name(options.model)
    small = name in _SMALL
    usual = _usual_of_folder(options) if _is_folder(options.model) else _usual_of_preset(options)
    steps = options.steps or (200 if small else 1000)
    return Recipe(
        model=name,
        sizes=usual.sizes,
        context=usual.context,
        sequences=options.sequences or (4 if small else 8),
        steps=steps,
        learning_rate=options.learning_rate or usual.learning_rate,
        warmup_steps=max(1, min(50, steps // 10)),
        weight_decay=usual.weight_decay,
        clip_norm=1.0 if options.clip_norm is None else options.clip_norm,
        seed=options.seed or 0,
        local_steps=options.local_steps or 0,
        evaluate_every=options.evaluate_every or max(1, steps // 8),
        checkpoint_every=options.checkpoint_every or max(1, steps // 4),
        optimizer=options.optimizer or "adamw",
        packed=options.packing,
        lora=None if options.lora is None else parse_lora(options.lora),
        schedule=options.schedule or "cosine",
        precision=options.precision or "fp32",
        gradient_dtype=options.gradient_dtype,
        objective=_objective(options),
        beta=options.beta or USUAL_BETA,
    )


def _objective(options: TrainOptions) -> str:
    objective = options.objective or "next-token"
    if objective == "dpo" and not _is_folder(options.model):
        raise ConfigError(
            "--objective dpo teaches a trained model what to prefer; name its folder with --model"
        )
    if objective != "dpo" and options.beta is not None:
        raise ConfigError("--beta belongs to --objective dpo; give both, or leave it out")
    return objective


def model_name(model: str | None) -> str:
    """Return how a model that the user named is called: a preset, an id, or the folder's name."""
    if model is None:
        return "demo"
    path = Path(model).expanduser()
    is_path = path.is_dir() or model.startswith((".", "/", "~"))
    return path.resolve().name if _is_folder(model) and is_path else model


def check_model(model: str) -> None:
    """Refuse a name that is neither a preset nor a Hugging Face model that is there.

    Raises:
        ConfigError: says what there is.
    """
    if _is_folder(model):
        read_config(model_folder(model))
    else:
        preset(model)


class _Usual(NamedTuple):
    """What depends on the kind of model, where the user says nothing else."""

    sizes: Sizes
    context: int
    learning_rate: float
    weight_decay: float


def _is_folder(model: str | None) -> bool:
    return model is not None and is_hugging_face(model)


def _usual_of_preset(options: TrainOptions) -> _Usual:
    if options.lora is not None:
        raise ConfigError("--lora adapts a trained model; name its folder with --model")
    sizes = preset(options.model or "demo")
    context = options.context or sizes.context
    sizes = dataclasses.replace(
        sizes,
        vocabulary=options.vocabulary or sizes.vocabulary,
        context=max(sizes.context, context),
        dropout=sizes.dropout if options.dropout is None else options.dropout,
    )
    # Larger models want smaller rates (Brown et al. 2020, table 2.1: 6e-4 at 768 wide).
    return _Usual(sizes, context, min(2e-3, 6e-4 * 768 / sizes.width), weight_decay=0.1)


def _usual_of_folder(options: TrainOptions) -> _Usual:
    assert options.model is not None
    for field in ("vocabulary", "dropout"):
        if getattr(options, field) is not None:
            raise ConfigError(
                f"--{field} is for models that start anew; {options.model} has its own: leave the "
                "option out, or edit its config.json"
            )
    sizes = read_config(model_folder(options.model))
    context = options.context or min(sizes.context or _FINE_TUNING_CONTEXT, _FINE_TUNING_CONTEXT)
    check_context(options.model, context, sizes.context)
    # What was learnt is to be kept: rates are those usual in fine-tuning, 2e-5 at 4096 wide.
    # Adapters begin at nothing, and take ten times as much (Hu et al. 2021, table 11).
    rate = min(1e-4, 2e-5 * 4096 / sizes.width) * (1 if options.lora is None else 10)
    if options.objective == "dpo":
        rate /= 20  # 1e-6 where fine-tuning takes 2e-5 (Rafailov et al. 2023, appendix B)
    return _Usual(sizes, context, rate, weight_decay=0.0)


def amended(recipe: Recipe, options: TrainOptions, source: str) -> Recipe:
    """Return a recipe that was read from `source`, with the options that may differ.

    The optimizer may change to one that gives the same bits, with masters split or whole.

    Raises:
        ConfigError: an option contradicts what is fixed: model, its sizes, objective, optimizer,
            precision, or the seed.
    """
    fixed = {
        "model": recipe.model,
        "dropout": recipe.sizes.dropout,
        "vocabulary": recipe.sizes.vocabulary,
        "seed": recipe.seed,
        "context": recipe.context,
        "optimizer": recipe.optimizer,
        "precision": recipe.precision,
        "gradient_dtype": recipe.gradient_dtype,
        "clip_norm": recipe.clip_norm,
        "lora": recipe.lora,
        "objective": recipe.objective,
        "beta": recipe.beta,
    }
    for field, value in fixed.items():
        given = getattr(options, field)
        if field == "model" and given is not None:
            given = model_name(given)
        if field == "lora" and given is not None:
            given = parse_lora(given)
        if field == "optimizer" and given is not None and train_alike(given, recipe.optimizer):
            continue
        if given is not None and given != value:
            name = field.replace("_", "-")
            raise ConfigError(
                f"--{name} {given} contradicts {source}, which has {name} {value}; leave the "
                "option out, or start another run"
            )
    changes = {
        field: getattr(options, field)
        for field in (
            "sequences", "steps", "learning_rate", "local_steps", "evaluate_every",
            "checkpoint_every", "schedule", "optimizer",
        )
        if getattr(options, field) is not None
    }  # fmt: skip
    if options.measured_rounds:
        changes["local_steps"] = 0
    return dataclasses.replace(recipe, **changes)


def make_optimizer(model: nn.Module, recipe: Recipe) -> Optimizer:
    """Return the recipe's optimizer of all of a model's trainable parameters."""
    return named_optimizer(
        model,
        recipe.optimizer,
        recipe.precision,
        learning_rate=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        seed=recipe.seed,
    )
