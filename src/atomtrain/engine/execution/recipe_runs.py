"""The layers that run by recipes: which they are, and one run of each, from forward to backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atomtrain.analysis.costs.costs import ChainCosts
from atomtrain.analysis.costs.storages import View, seen_as, view_of
from atomtrain.analysis.layers.chain import Chain, Layer
from atomtrain.analysis.layers.graph_layer import GraphLayer
from atomtrain.engine.execution.offload import Parcel, SentStorage
from atomtrain.engine.execution.recipes import Like, Recipe, like, recipe_of
from atomtrain.engine.execution.saved_script import Key, key_of
from atomtrain.engine.state.gradients import Collector


class Lesson(NamedTuple):
    """What a layer ran with by autograd, from which its recipe is made."""

    key: Key
    number: int
    reads: Sequence[Like]
    stays: Sequence[Like]


class KnownRecipe(NamedTuple):
    """A recipe, and how gradients lie in memory where autograd makes them."""

    recipe: Recipe
    reads: Sequence[tuple[int, ...]]
    """Strides of what is read."""
    gradient: tuple[int, ...]
    """Of the gradient that comes."""
    gradients: Mapping[str, tuple[int, ...]]
    """Of those that go."""
    root: str
    """The value whose gradient comes."""
    keys: Sequence[int]
    """The `id` of each parameter that it takes; 0 of a buffer."""


class Recipes:
    """The recipes of a chain's layers. A layer runs once by autograd, which tells how gradients
    lie in memory, and from then on by its recipe."""

    def __init__(self, chain: Chain, costs: ChainCosts, *, remakes: bool) -> None:
        """Know of none yet."""
        self._chain, self._remakes = chain, remakes
        readers: dict[str, int] = {}
        for layer in chain.layers:
            for name in layer.reads:
                readers[name] = readers.get(name, 0) + 1
        self._needs: dict[int, tuple[bool, ...]] = {}
        """Which of the values that a layer reads have a gradient."""
        self._roots: dict[int, int] = {}
        """Which of the values that it writes has one."""
        for number, (layer, cost) in enumerate(zip(chain.layers, costs.layers, strict=True)):
            needs = tuple(costs.values[name].requires_grad for name in layer.reads)
            roots = [i for i, name in enumerate(layer.writes) if costs.values[name].requires_grad]
            # A value of which several layers take: its gradients add up in autograd's order.
            alone = all(readers[n] == 1 for n, has in zip(layer.reads, needs, strict=True) if has)
            unique = len({id(p) for p in layer.parameters.values()}) == len(layer.parameters)
            fit = isinstance(layer.module, GraphLayer) and not cost.changes_buffers
            if fit and alone and unique and cost.saved.movable and len(roots) == 1:
                self._needs[number], self._roots[number] = needs, roots[0]
        self._known: dict[Key, KnownRecipe | None] = {}
        self._kinds: dict[Any, Recipe | None] = {}

    def names(self, number: int) -> Sequence[str]:
        """Return the parameters and buffers that a layer's recipe takes, in their order."""
        module = self._chain.layers[number].module
        assert isinstance(module, GraphLayer)
        return module.names

    def able(self, number: int) -> bool:
        """Return whether a layer may have a recipe."""
        return number in self._roots and not torch.is_autocast_enabled()

    def find(self, number: int, values: Sequence[Any]) -> KnownRecipe | None:
        """Return by what a layer runs on such values, if it is known."""
        if not self.able(number):
            return None
        key = key_of(number, self._chain.layers[number], values)
        known = None if key is None else self._known.get(key)
        if known is None:
            return None
        for value, stride in zip(values, known.reads, strict=True):
            if value.stride() != stride:
                return None
        return known

    def lesson(self, number: int, stays: Sequence[Tensor], values: Sequence[Any]) -> Lesson | None:
        """Return what is to be learnt of a layer that runs by autograd; `None` if nothing is."""
        key = key_of(number, self._chain.layers[number], values) if self.able(number) else None
        if key is None or key in self._known:
            return None
        if not all(isinstance(value, Tensor) for value in values):
            return None
        needs = self._needs[number]
        reads = [like(v, requires_grad=has) for v, has in zip(values, needs, strict=True)]
        return Lesson(key, number, reads, [like(t, requires_grad=t.requires_grad) for t in stays])

    def learn(
        self, lesson: Lesson, seeds: Mapping[str, Like], gradients: Mapping[str, Tensor]
    ) -> None:
        """Make a recipe of what autograd did.

        Args:
            lesson: What the layer ran with.
            seeds: The gradients that came.
            gradients: Those that went.
        """
        layer = self._chain.layers[lesson.number]
        root = self._roots[lesson.number]
        gradient = seeds.get(layer.writes[root])
        if gradient is None:
            return
        module = layer.module
        assert isinstance(module, GraphLayer)
        template = (
            module.other.template if module.mode.is_other and module.other else module.template
        )
        kind = (template, *lesson.reads, *lesson.stays, gradient)
        if kind not in self._kinds:
            self._kinds[kind] = recipe_of(
                _runner(module), lesson.stays, lesson.reads, gradient, root, remakes=self._remakes
            )
        recipe = self._kinds[kind]
        self._known[lesson.key] = (
            None
            if recipe is None
            else KnownRecipe(
                recipe,
                [one.stride for one in lesson.reads],
                gradient.stride,
                {name: one.stride() for name, one in gradients.items()},
                layer.writes[root],
                [id(layer.parameters[n]) if n in layer.parameters else 0 for n in module.names],
            )
        )


def _runner(module: GraphLayer) -> Callable[[Sequence[Any]], Sequence[Any]]:
    names = module.names

    def run(given: Sequence[Any]) -> Sequence[Any]:
        return module.run(dict(zip(names, given, strict=False)), given[len(names) :])

    return run


class RecipeRun:
    """One micro-batch's run of a layer by its recipe, from its forward visit to its backward
    visit."""

    def __init__(
        self,
        known: KnownRecipe,
        layer: Layer,
        leaves: Sequence[Tensor],
        parcel: Parcel,
        collector: Collector,
    ) -> None:
        """Begin.

        Args:
            known: The recipe.
            layer: Which layer it is.
            leaves: Its parameters and buffers, whose gradients are added to.
            parcel: Takes what is sent.
            collector: Takes the gradients.
        """
        self.parcel, self._offload = parcel, parcel.offload
        self._known, self._layer, self._leaves = known, layer, leaves
        self._keys, self._collector = known.keys, collector
        self.root = known.root
        self._sent: dict[int, tuple[SentStorage, View]] = {}

    def forward(self, values: Sequence[Any]) -> Sequence[Any]:
        """Return what the layer writes."""
        recipe = self._known.recipe
        with torch.no_grad():
            written = recipe.forward(self, *self._leaves, *values)
        self.parcel.note([self._sent[number][0] for number in reversed(recipe.taken)])
        return written

    def backward(self, stays: Sequence[Tensor], gradient: Tensor | None) -> dict[str, Tensor]:
        """Add to the gradients of parameters; return those of what was read.

        Args:
            stays: Parameters and buffers where they are now.
            gradient: Of what was written; `None` if nobody needs it.
        """
        known = self._known
        if gradient is None:
            self.parcel.close()
            return {}
        with torch.no_grad():
            seed = _with_strides(gradient, known.gradient)
            del gradient
            found = known.recipe.backward(self, seed, *stays)
        self.parcel.close()
        return {
            name: _with_strides(one, known.gradients[name])
            for name, one in zip(self._layer.reads, found, strict=True)
            if one is not None
        }

    def send(self, number: int, tensor: Tensor) -> None:
        """Send a tensor's storage to the host."""
        sent = self._offload.send(tensor)
        sent.users = 1
        self._sent[number] = sent, view_of(tensor)

    def take(self, number: int) -> Tensor:
        """Return the tensor whose storage was sent."""
        sent, view = self._sent[number]
        return seen_as(self._offload.use(sent), view)

    def done(self, number: int) -> None:
        """Take note that nobody needs it any more."""
        sent, _ = self._sent[number]
        sent.users = 0
        self._offload.used(sent)

    def add(self, number: int, gradient: Tensor) -> None:
        """Add to the gradient of a parameter."""
        self._collector.add(self._keys[number], self._leaves[number], gradient)


def _with_strides(gradient: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return a gradient as autograd would have it in memory."""
    if gradient.stride() == strides:
        return gradient
    laid: Tensor = torch.empty_strided(
        gradient.shape, strides, dtype=gradient.dtype, device=gradient.device
    ).copy_(gradient)
    return laid
