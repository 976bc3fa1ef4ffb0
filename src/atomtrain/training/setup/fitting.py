"""How a step is divided into micro-batches, and the head into pieces, so that both fit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import nn

from atomtrain.analysis import chain_of, layer_costs
from atomtrain.analysis.costs.costs import ChainCosts
from atomtrain.analysis.head.head import split_head, with_head_of
from atomtrain.analysis.layers.chain import Chain
from atomtrain.data.examples import IGNORED
from atomtrain.data.sampler import Batch
from atomtrain.engine.api import Fitted
from atomtrain.engine.calibration.machines import budget_bytes
from atomtrain.engine.devices.device import Device
from atomtrain.engine.state.gradients import with_gradients_in
from atomtrain.errors import AnalysisError
from atomtrain.planning.plan.updating import share_of
from atomtrain.planning.search.search import fits
from atomtrain.progress import Progress
from atomtrain.training.config.options import TrainOptions
from atomtrain.training.config.recipe import Recipe
from atomtrain.training.setup.budgets import check_micro_batch
from atomtrain.training.setup.objective import MicroBatch, Objective
from atomtrain.training.setup.sources import Source
from atomtrain.training.setup.texts import Text

_MOST_TOKENS_A_MICRO_BATCH = 4096
_PIECES = (2, 4, 8, 16, 32, 64)


class Fit(NamedTuple):
    """How a step is divided so that it fits the device."""

    micro_batch: int
    """Sequences of a micro-batch."""
    head_pieces: int | None
    """Pieces of the vocabulary in which the head computes its loss, `None` if whole."""


class Fitting:
    """Finds how a step is divided, when the model and the devices are there."""

    fit: Fit
    example: MicroBatch

    def __init__(self, options: TrainOptions, source: Source, objective: Objective) -> None:
        self._options, self._source, self._objective = options, source, objective

    def __call__(self, model: nn.Module, devices: Sequence[Device]) -> Fitted:
        recipe = self._source.recipe
        self.fit, fitted = self._found(model, devices)
        size, pieces = self.fit
        check_micro_batch(size, recipe)
        if fitted is None:
            example = example_of(recipe, size, self._objective, self._source.text)
            fitted = Fitted(example, recipe.sequences // size, None)
        self.example = cast(MicroBatch, fitted.example)
        return fitted._replace(head_pieces=pieces)

    def _found(self, model: nn.Module, devices: Sequence[Device]) -> tuple[Fit, Fitted | None]:
        """A resumed run keeps its own, because sums in another order have other last bits."""
        options, source = self._options, self._source
        if source.checkpoint is not None:
            meta = source.checkpoint.meta
            size = options.micro_batch or int(meta["micro_batch"])
            return Fit(size, options.head_pieces or meta.get("head_pieces")), None
        if options.micro_batch is not None and options.head_pieces is not None:
            return Fit(options.micro_batch, options.head_pieces), None
        if options.micro_batch is not None:
            check_micro_batch(options.micro_batch, source.recipe)
        fit, fitted = find_fit(
            model, source.recipe, devices, self._objective, source.text, options.micro_batch
        )
        return fit._replace(head_pieces=options.head_pieces or fit.head_pieces), fitted


def find_fit(
    model: nn.Module,
    recipe: Recipe,
    devices: Sequence[Device],
    objective: Objective,
    text: Text | None = None,
    micro_batch: int | None = None,
) -> tuple[Fit, Fitted]:
    """Return a micro-batch that fits the budget well: the largest divisor of a step's sequences.

    Where there are enough sequences each device gets a micro-batch. The head stays whole if a
    single sequence fits with it; then the result is that of ordinary training bit for bit. Else it
    gets the fewest pieces with which one fits. With `micro_batch` that size is tried only. What is
    known of the model on that micro-batch comes along, with the head whole.
    """
    together = objective.together
    sizes = _sizes(recipe, together, len(devices)) if micro_batch is None else [micro_batch]
    tried = [_Tried(model, recipe, devices, objective, text, size) for size in sizes]
    chosen, pieces = _fitting(tried)
    return Fit(chosen.size, pieces), chosen.whole


def _fitting(tried: Sequence[_Tried]) -> tuple[_Tried, int | None]:
    least = tried[-1]
    if tried[0].fits(None):  # mostly it does, and the others need not be analysed
        return tried[0], None
    for pieces in (None, *_PIECES) if least.fits_but_for_its_head else ():
        if least.fits(pieces):
            return next(t for t in tried if t.fits(pieces)), pieces
    # Nothing does: the planner's error says what would.
    return least, _PIECES[-1] if least.splits else None


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
        return fits(self._chain, costs, self._budget_bytes, self._micro_batches)

    def _costs_in(self, pieces: int) -> ChainCosts:
        return with_head_of(split_head(self._chain, pieces), self._costs)

    @functools.cached_property
    def whole(self) -> Fitted:
        """What is known of the model on a micro-batch of this size, with its head whole."""
        example = example_of(self._recipe, self.size, self._objective, self._text)
        device = self._devices[0].torch_device
        with Progress("tracing the model"):
            traced = chain_of(self._model, example, self._objective.loss, device=device)
        chain = with_gradients_in(traced.chain, self._recipe.gradient_dtype)
        costs = layer_costs(chain, traced.bind(example), device)
        return Fitted(example, self._recipe.sequences // self.size, None, traced, costs)

    @property
    def _costs(self) -> ChainCosts:
        assert self.whole.costs is not None
        return self.whole.costs

    @property
    def _chain(self) -> Chain:
        assert self.whole.traced is not None
        return with_gradients_in(self.whole.traced.chain, self._recipe.gradient_dtype)


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
