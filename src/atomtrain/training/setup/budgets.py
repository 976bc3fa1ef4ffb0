"""What fits: the device's budget, the host's memory, and how large a micro-batch may be."""

from __future__ import annotations

from torch import nn

from atomtrain.engine.calibration.machines import host_memory_bytes
from atomtrain.engine.devices.gpus import names_gpu
from atomtrain.engine.devices.host_memory import host_memory
from atomtrain.errors import ConfigError, PlanError
from atomtrain.models import GPTConfig
from atomtrain.models.making import parameter_count
from atomtrain.training.config.optimizing import host_bytes_per_parameter, smaller_states
from atomtrain.training.config.options import TrainOptions
from atomtrain.training.config.recipe import Recipe
from atomtrain.units import format_bytes, format_count, parse_bytes

_SMALL_BUDGETS = {"demo": ("40MiB", "144MiB"), "tiny": ("8MiB", "112MiB")}
"""Default budgets that make small models larger than their device: emulated, and a GPU, whose
libraries take a workspace of their own."""
_LEAST_EMBEDDED = 4
"""Sequences of a micro-batch in which a query has another text beside its own."""


def device_memory_of(options: TrainOptions, recipe: Recipe) -> str | None:
    """Return the device budget, `None` for the device's own default."""
    small = isinstance(recipe.sizes, GPTConfig) and recipe.model in _SMALL_BUDGETS
    small = small and options.device != "cpu"
    if options.device_memory is not None or not small:
        return options.device_memory
    return _SMALL_BUDGETS[recipe.model][names_gpu(options.device)]


def check_host_memory(outline: nn.Module, recipe: Recipe, options: TrainOptions) -> None:
    """Refuse a model whose parameters, gradients and optimizer state the host cannot hold.

    Raises:
        PlanError: says what is needed and what would fit.
    """
    if options.disk is not None:
        return  # the planner knows what must be in memory then
    kind = recipe.precision, recipe.gradient_dtype
    spent = options.spend_gradients
    each_bytes = host_bytes_per_parameter(recipe.optimizer, *kind, spent=spent)
    trained, frozen_bytes = 0, sum(buffer.nbytes for buffer in outline.buffers())
    for parameter in outline.parameters():
        if parameter.requires_grad:
            trained += parameter.numel()
        else:
            frozen_bytes += parameter.nbytes
    needed_bytes, there_bytes = each_bytes * trained + frozen_bytes, host_memory_bytes()
    if options.host_memory is not None:
        there_bytes = parse_bytes(options.host_memory, "--host-memory")
    if needed_bytes > there_bytes:
        given = options.host_memory is not None
        said = "" if given else f" ({host_memory()}, some room is left)"
        smaller = smaller_states(recipe.optimizer, *kind, spent=spent)
        would_fit = (
            f", or --optimizer {name}"
            for name, smaller_bytes in smaller.items()
            if smaller_bytes * trained + frozen_bytes <= there_bytes
        )
        raise PlanError(
            f"training {recipe.model} ({format_count(parameter_count(outline))} parameters) takes "
            f"{format_bytes(needed_bytes)} of host memory, {format_bytes(there_bytes)} are there"
            f"{said}; "
            f"choose a model of at most {format_count(there_bytes // each_bytes)} parameters, "
            f"--disk FOLDER{next(would_fit, '')}"
        )


def check_resident(outline: nn.Module, what: str) -> None:
    """Refuse a model whose parameters and buffers memory cannot hold as a whole.

    Raises:
        PlanError: says what it needs and what is there.
    """
    needed_bytes = sum(tensor.nbytes for tensor in (*outline.parameters(), *outline.buffers()))
    if needed_bytes > host_memory_bytes():
        raise PlanError(
            f"the model in {what} takes {format_bytes(needed_bytes)} of memory, "
            f"{format_bytes(host_memory_bytes())} are there ({host_memory()}); give a smaller "
            "model, or use another machine"
        )


def check_micro_batch(micro_batch: int, recipe: Recipe) -> None:
    """Refuse a micro-batch that does not divide a step.

    Raises:
        ConfigError: it does not.
    """
    if recipe.sequences % micro_batch:
        raise ConfigError(
            f"--micro-batch {micro_batch} does not divide the {recipe.sequences} sequences of a "
            "step; give a divisor, or change --sequences"
        )
    if recipe.in_pairs and micro_batch % 2:
        raise ConfigError(
            f"--micro-batch {micro_batch} is odd, but with --objective {recipe.objective} every "
            "pair takes two sequences; give an even divisor"
        )
    if recipe.objective == "embed" and micro_batch < _LEAST_EMBEDDED:
        raise ConfigError(
            f"a micro-batch of {micro_batch} sequences has one query and its text, and no other "
            "text to tell it from; raise --micro-batch (and --sequences), or --device-memory if "
            "no more fits"
        )
