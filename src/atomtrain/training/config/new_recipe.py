"""From options to a recipe: of a new run, or of one that is resumed or joined."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from atomtrain.errors import ConfigError
from atomtrain.models.gpt_config import preset
from atomtrain.models.hugging_face import (
    check_context,
    is_hugging_face,
    model_folder,
    read_config,
    read_quantisation,
)
from atomtrain.models.lora_config import LoraConfig, parse_lora
from atomtrain.models.making import Sizes
from atomtrain.settings import chosen
from atomtrain.training.config.optimizing import AUTO, named_optimizer, train_alike
from atomtrain.training.config.options import TrainOptions
from atomtrain.training.config.preflight import check_factors
from atomtrain.training.config.recipe import EACH_PEER, FIXED, MAY_CHANGE, OBJECTIVES, Recipe
from atomtrain.units import counted

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

_FINE_TUNING_CONTEXT = 1024
_SMALL = ("demo", "tiny")
"""Models that train in minutes on two CPU cores; with little text, more small steps do better."""
_SLOWER = {"dpo": 20, "simpo": 20, "orpo": 4, "kto": 20, "reward": 2}
"""Where fine-tuning takes a rate of 2e-5, DPO and SimPO take about 1e-6 (Rafailov et al. 2023,
appendix B; Meng et al. 2024, appendix B), KTO as DPO, ORPO 5e-6 (Hong et al. 2024, appendix C),
and reward models 1e-5 (Touvron et al. 2023, section 3.2.2)."""
_OWN_HEADS = ("classify", "reward", "embed")
"""Objectives for which the head of a language model is replaced, or left out."""
_SIMPO_BETA = 2.0
"""The least of those that Meng et al. 2024 use."""


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
    settings: dict[str, Any] = {
        "context": usual.context,
        "sequences": 4 if small else 8,
        "steps": steps,
        "learning_rate": usual.learning_rate,
        "evaluate_every": max(1, steps // 8),
        "checkpoint_every": max(1, steps // 4),
        "warmup_steps": _warmup_steps(options.warmup_ratio, steps),
        "weight_decay": usual.weight_decay,
        **({"beta": _SIMPO_BETA} if options.objective == "simpo" else {}),
        **chosen(options, Recipe),
        "precision": _precision(options),
    }
    _check_objective(options)
    return Recipe(
        **{
            **settings,
            "model": name,
            "sizes": usual.sizes,
            "local_steps": options.local_steps or 0,
            "lora": None if options.lora is None else _adapters(options.lora, options.model),
        }
    )


def _adapters(lora: str, model: str | None) -> LoraConfig:
    assert model is not None
    return parse_lora(lora).published_as(read_quantisation(model_folder(model)))


def _warmup_steps(ratio: float | None, steps: int) -> int:
    return max(1, min(50, steps // 10)) if ratio is None else math.ceil(ratio * steps)


def _precision(options: TrainOptions) -> str:
    """Return what the user chose, or what the device computes fast."""
    from atomtrain.engine.devices.native import native_precision

    if options.precision not in (None, AUTO):
        return str(options.precision)
    # Gradients are averaged in float32 only.
    return "fp32" if options.average == "gradient" else native_precision(options.device)


def _check_objective(options: TrainOptions) -> None:
    objective = options.objective or OBJECTIVES[0]
    if objective != OBJECTIVES[0] and not _is_folder(options.model):
        raise ConfigError(
            f"--objective {objective} goes on with a trained model; name its folder with --model"
        )
    check_factors(options)


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
    if sizes.labels is not None or sizes.embeds:
        check_head_of(options.objective or OBJECTIVES[0], sizes, options.model)
    context = options.context or min(sizes.context or _FINE_TUNING_CONTEXT, _FINE_TUNING_CONTEXT)
    check_context(options.model, context, sizes.context)
    # What was learnt is to be kept: rates are those usual in fine-tuning, 2e-5 at 4096 wide.
    # Adapters begin at nothing, and take ten times as much (Hu et al. 2021, table 11).
    rate = min(1e-4, 2e-5 * 4096 / sizes.width) * (1 if options.lora is None else 10)
    rate /= _SLOWER.get(options.objective or "", 1)
    return _Usual(sizes, context, rate, weight_decay=0.0)


def check_head_of(objective: str, sizes: Sizes, what: str) -> None:
    """Refuse a model whose head does not say what is to be learnt.

    Args:
        objective: Of a recipe.
        sizes: Of the model.
        what: The model.

    Raises:
        ConfigError: says what its head is for.
    """
    found, has = OBJECTIVES[0], "is a language model"
    labels = getattr(sizes, "labels", None)
    if getattr(sizes, "embeds", False):
        found, has = "embed", "has no head (architectures in its config.json)"
    elif labels is not None:
        found = "classify" if len(labels) > 1 else "reward"
        has = f"has a head of {counted(len(labels), 'output')} on a sequence"
    if found != (objective if objective in _OWN_HEADS else OBJECTIVES[0]):
        raise ConfigError(
            f"{what} {has}, which --objective {objective} does not train; give --objective "
            f"{found}, or another --model"
        )


def amended(recipe: Recipe, options: TrainOptions, source: str, *, joins: bool = False) -> Recipe:
    """Return a recipe that was read from `source`, with the options that may differ.

    The optimizer may change to one that gives the same bits, with masters split or whole. Who
    `joins` may compute in another precision: peers exchange float32.

    Raises:
        ConfigError: an option contradicts what is fixed: model, its sizes, objective, optimizer,
            precision, or the seed.
    """
    if options.precision == AUTO:
        options = dataclasses.replace(options, precision=None)
    own = _on_resume(EACH_PEER)
    fixed = {"dropout": recipe.sizes.dropout, "vocabulary": recipe.sizes.vocabulary}
    fixed |= {name: getattr(recipe, name) for name in _on_resume(FIXED) + own * (not joins)}
    for field, value in fixed.items():
        given = getattr(options, field)
        if field == "model" and given is not None:
            given = model_name(given)
        if field == "lora" and given is not None:
            given = parse_lora(given)
            if recipe.lora is not None:
                given = dataclasses.replace(given, published=recipe.lora.published)
        if field == "optimizer" and given is not None and train_alike(given, recipe.optimizer):
            continue
        if given is not None and given != value:
            name = field.replace("_", "-")
            raise ConfigError(
                f"--{name} {given} contradicts {source}, which has {name} {value}; leave the "
                "option out, or start another run"
            )
    if options.train_tower and not recipe.train_tower:
        raise ConfigError(
            f"--train-tower contradicts {source}, which leaves the tower as it is; leave the "
            "option out, or start another run"
        )
    changes = {
        name: getattr(options, name)
        for name in (*_on_resume(MAY_CHANGE), *own, "optimizer")
        if getattr(options, name) is not None
    }
    if options.measured_rounds:
        changes["local_steps"] = 0
    return dataclasses.replace(recipe, **changes)


def _on_resume(what: str) -> list[str]:
    """Return the recipe's fields of which whoever resumes or joins may give `what`."""
    declared = dataclasses.fields(Recipe)
    return [field.name for field in declared if field.metadata.get("on_resume") == what]


def make_optimizer(model: nn.Module, recipe: Recipe) -> Optimizer:
    return named_optimizer(
        model,
        recipe.optimizer,
        recipe.precision,
        learning_rate=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        layer_lr_decay=recipe.layer_lr_decay,
        seed=recipe.seed,
    )
