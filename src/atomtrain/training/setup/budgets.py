"""What fits: the device's budget, the host's memory, and how large a micro-batch may be."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from atomtrain.analysis import chain_of, layer_costs
from atomtrain.analysis.costs.costs import ChainCosts
from atomtrain.analysis.head.head import split_head, with_head_of
from atomtrain.analysis.layers.chain import Chain
from atomtrain.data.examples import IGNORED
from atomtrain.data.sampler import Batch
from atomtrain.engine.calibration.machines import budget_bytes, host_memory_bytes
from atomtrain.engine.devices.device import Device
from atomtrain.engine.devices.gpus import names_gpu
from atomtrain.engine.devices.host_memory import host_memory
from atomtrain.engine.state.gradients import with_gradients_in
from atomtrain.errors import AnalysisError, ConfigError, PlanError
from atomtrain.models import GPTConfig
from atomtrain.models.making import parameter_count
from atomtrain.planning.plan.updating import share_of
from atomtrain.planning.search.search import fits
from atomtrain.progress import Progress
from atomtrain.training.config.optimizing import host_bytes_per_parameter, smaller_states
from atomtrain.training.config.options import TrainOptions
from atomtrain.training.config.recipe import Recipe
from atomtrain.training.setup.objective import MicroBatch, Objective
from atomtrain.training.setup.texts import Text
from atomtrain.units import format_bytes, format_count, parse_bytes

_SMALL_BUDGETS = {"demo": ("40MiB", "144MiB"), "tiny": ("8MiB", "112MiB")}
"""Default budgets that make small models larger than their device: emulated, and a GPU, whose
libraries take a workspace of their own."""
_MOST_TOKENS_A_MICRO_BATCH = 4096
_LEAST_EMBEDDED = 4
"""Sequences of a micro-batch in which a query has another text beside its own."""
_PIECES = (2, 4, 8, 16, 32, 64)


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


class Fit(NamedTuple):
    """How a step is divided so that it fits the device."""

    micro_batch: int
    """Sequences of a micro-batch."""
    head_pieces: int | None
    """Pieces of the vocabulary in which the head computes its loss, `None` if whole."""


def find_fit(
    model: nn.Module,
    recipe: Recipe,
    devices: Sequence[Device],
    objective: Objective,
    text: Text | None = None,
    micro_batch: int | None = None,
) -> Fit:
    """Return a micro-batch that fits the budget well: the largest divisor of a step's sequences.

    Where there are enough sequences each device gets a micro-batch. The head stays whole if a
    single sequence fits with it; then the result is that of ordinary training bit for bit. Else it
    gets the fewest pieces with which one fits. With `micro_batch` that size is tried only.
    """
    together = objective.together
    sizes = _sizes(recipe, together, len(devices)) if micro_batch is None else [micro_batch]
    tried = [_Tried(model, recipe, devices, objective, text, size) for size in sizes]
    least = tried[-1]
    if tried[0].fits(None):  # mostly it does, and the others need not be analysed
        return Fit(sizes[0], None)
    for pieces in (None, *_PIECES) if least.fits_but_for_its_head else ():
        if least.fits(pieces):
            return Fit(next(t.size for t in tried if t.fits(pieces)), pieces)
    # Nothing does: the planner's error says what would.
    return Fit(sizes[-1], _PIECES[-1] if least.splits else None)


def _sizes(recipe: Recipe, together: int, devices: int) -> list[int]:
    """Return the sizes of a micro-batch, largest first; the last is what belongs together."""
    most = min(recipe.sequences // devices, _MOST_TOKENS_A_MICRO_BATCH // recipe.context)
    sizes = range(most // together * together, 0, -together)
    few = [size for size in sizes if recipe.sequences % size == 0]
    return [*few, *([] if together in few else [together])]


class _Tried:
    """One size of a micro-batch; the model is analysed when it is asked for, and once."""

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        devices: Sequence[Device],
        objective: Objective,
        text: Text | None,
        size: int,
    ) -> None:
        self.size, self._text = size, text
        self._model, self._recipe, self._objective = model, recipe, objective
        self._devices = devices
        self._budget_bytes = budget_bytes(*devices)
        self._micro_batches = share_of(recipe.sequences // size, len(devices))

    def fits(self, pieces: int | None) -> bool:
        """Return whether some plan fits with the head in so many pieces."""
        if pieces is None:
            return self._fits(self._costs)
        return self.splits and self._fits(self._costs_in(pieces))

    @property
    def fits_but_for_its_head(self) -> bool:
        """Whether some plan fits if the head needs no memory to work in, however it is split."""
        *others, head = self._costs.layers
        head = dataclasses.replace(
            head, forward_bytes=0, kept_bytes=0, graph_bytes=0, backward_bytes=0
        )
        return self._fits(self._costs._replace(layers=(*others, head)))

    @functools.cached_property
    def splits(self) -> bool:
        """Whether the head can compute its loss in pieces."""
        try:
            self._costs_in(_PIECES[0])  # some losses tell when they run
        except AnalysisError:
            return False
        return True

    def _fits(self, costs: ChainCosts) -> bool:
        chain, _ = self._traced
        return fits(chain, costs, self._budget_bytes, self._micro_batches)

    def _costs_in(self, pieces: int) -> ChainCosts:
        chain, _ = self._traced
        return with_head_of(split_head(chain, pieces), self._costs)

    @functools.cached_property
    def _costs(self) -> ChainCosts:
        """With the head as it is."""
        return layer_costs(*self._traced, on_gpu=self._devices[0].torch_device.type != "cpu")

    @functools.cached_property
    def _traced(self) -> tuple[Chain, Mapping[str, Any]]:
        example = example_of(self._recipe, self.size, self._objective, self._text)
        with Progress("tracing the model"):
            traced = chain_of(
                self._model, example, self._objective.loss, device=self._devices[0].torch_device
            )
        chain = with_gradients_in(traced.chain, self._recipe.gradient_dtype)
        return chain, traced.bind(example)


def example_of(
    recipe: Recipe, micro_batch: int, objective: Objective, text: Text | None = None
) -> MicroBatch:
    """Return a micro-batch of so many sequences of random tokens; with images, of the `text`.

    With packing each has two documents: models that look at the data leave the mask out where
    nothing is masked.
    """
    if text is not None and text.sees_images:  # as many tokens as the images have features
        batch = text.largest(recipe.context, micro_batch)
        return objective.micro_batches(batch, micro_batch)[0]
    generator = torch.Generator().manual_seed(0)
    shape = (micro_batch, recipe.context)
    ids = torch.randint(recipe.sizes.vocabulary, shape, generator=generator)
    documents, labels = None, ids
    if recipe.objective == "embed":  # as are texts of unlike length: models leave a full mask out
        labels = ids.clone()
        labels[0, -1] = IGNORED
    if recipe.packed:
        documents = (torch.arange(recipe.context) >= recipe.context // 2).long().expand(shape)
    return objective.micro_batches(Batch(ids, labels, documents=documents), micro_batch)[0]
