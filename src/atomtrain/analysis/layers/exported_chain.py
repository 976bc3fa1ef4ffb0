"""Turns any model into a chain: export, fold constants, cut, and give each layer its weights.

For its other mode (evaluation, when training was exported) the model is exported a second time, and
its operations are laid into the layers that exist. What crosses between layers travels under the
names that training gave it, so the plan stays as it is. All operations run in their order, on the
values that they read; where that is not possible within the layers, it is refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from atomtrain.analysis.export.as_traced import AsTraced, undone
from atomtrain.analysis.export.export import Exported, does_the_same, export
from atomtrain.analysis.export.flattening import place_of
from atomtrain.analysis.layers.chain import Layer
from atomtrain.analysis.layers.cuts import Piece, find_pieces
from atomtrain.analysis.layers.front import Rest
from atomtrain.analysis.layers.graph_layer import GraphLayer, Mode, OtherMode, Recipe, Template
from atomtrain.analysis.layers.graph_runs import Graph, Recipes, read_graph
from atomtrain.analysis.layers.limits import Limit
from atomtrain.analysis.layers.micro_batch import (
    ImageTokens,
    Inputs,
    MicroBatch,
    Ready,
    image_tokens,
)
from atomtrain.analysis.layers.own_ending import Inner
from atomtrain.errors import AnalysisError, ConfigError

PREFIX = "model."
"""Path of the model within what is exported."""


class ExportedLayers(NamedTuple):
    layers: list[Layer]
    """The last one writes the tensors of the model's output, in order, or the loss."""
    rebuild: Callable[[Sequence[Any]], Any]
    """Makes the model's output from what the last layer writes."""
    ready: Ready
    """See `Traced`."""
    image_tokens: list[ImageTokens]
    """What must hold of each micro-batch."""


def exported_layers(
    model: nn.Module,
    example: MicroBatch,
    inputs: Inputs | Rest | Inner,
    *,
    own_loss: bool,
    device: torch.device,
    before: Sequence[Layer] = (),
    as_eager: bool = False,
) -> ExportedLayers:
    """Return the layers of any model.

    Args:
        model: Weights may be on the meta device.
        example: One micro-batch; all later ones must have its shapes.
        inputs: Of the example.
        own_loss: The last layer writes the output's loss, not the output.
        device: Where the layers will run.
        before: Layers that come first, and hold parameters of the model.
        as_eager: See `export`.

    Raises:
        AnalysisError: see `export`.
    """
    tensors = inputs.tensors(example)
    graph = read_graph(
        model, tensors, inputs, own_loss=own_loss, grad=True, device=device, as_eager=as_eager
    )
    pieces = find_pieces(graph.varying, model, PREFIX, set(graph.exported.parameters))
    recipes = Recipes(graph, pieces, inputs.tensor_names)
    mode = Mode(model)
    layers = _layers(graph, recipes, mode)
    _carry_unused(model, layers, before)
    first = remember(graph, recipes)
    shapes = [torch.empty_like(tensor, device="meta") for tensor in tensors]
    own = tuple(layers)  # the caller may put another layer in the list
    attached = False

    known = {mode.training: AsTraced(model)}
    limits = {mode.training: graph.limits}

    def exported_now() -> Exported:
        grad = not mode.is_other
        return export(model, shapes, inputs.call, own_loss=own_loss, grad=grad, device=device)

    def ready(
        training: bool, settle: Callable[[], None], hold: Callable[[Sequence[Limit]], None]
    ) -> None:
        require_mode(training, settle)
        if limits[model.training]:
            hold(limits[model.training])

    def require_mode(training: bool, settle: Callable[[], None]) -> None:
        nonlocal attached
        if not mode.is_other or (attached and not training):
            before = known[model.training]
            known[model.training] = _require_same(model, before, exported_now, settle)
            return
        if training:
            raise ConfigError(
                f"the model was swapped with training={mode.training} and has "
                f"training={model.training} now; call model.train({mode.training}), or swap it "
                "again"
            )
        settle()
        other = read_graph(model, shapes, inputs, own_loss=own_loss, grad=False, device=device)
        attach(other, first, own, inputs.tensor_names)
        attached = True
        known[model.training] = AsTraced(model)
        limits[model.training] = other.limits

    exported = graph.exported
    tokens = image_tokens(model, exported.graph, exported.inputs, inputs.tensor_names)
    return ExportedLayers(layers, exported.rebuild, ready, tokens)


def _require_same(
    model: nn.Module,
    known: AsTraced,
    exported: Callable[[], Exported],
    settle: Callable[[], None],
) -> AsTraced:
    """Refuse what the caller has changed since the model was traced, if forward reads it.

    Returns:
        Modules as they are now, or `known`.

    Raises:
        ConfigError: forward would do something else now.
    """
    changes, hooks = known.changes(), known.other_hooks()
    if not changes and hooks is None:
        return known
    what = f"{hooks} has other hooks" if hooks is not None else changes[0].told
    if hooks is None:
        settle()
        with undone(changes):
            before = exported()
        if does_the_same(before, exported()):  # a number of the caller's own
            return AsTraced(model)
    raise ConfigError(
        f"{what}, but the model runs as it was when it was swapped; keep a number that changes in "
        "a registered buffer (and call engine.refresh_buffers()), or swap the model again"
    )


def _layers(graph: Graph, recipes: Recipes, mode: Mode) -> list[Layer]:
    templates: dict[Any, Template] = {}
    layers = []
    for index, piece in enumerate(recipes.pieces):
        recipe = recipes.recipe(index)
        key = recipe.key
        if key not in templates:
            templates[key] = Template(recipe)
        module = GraphLayer(
            templates[key],
            [graph.exported.parameters[node] for node in recipe.parameters],
            [recipes.buffer(node) for node in recipe.buffers],
            mode,
        )
        if index == len(recipes.pieces) - 1:
            writes = tuple(f"output/{position}" for position in range(len(recipe.writes)))
        else:
            writes = tuple(recipes.names[node] for node in recipe.writes)
        reads = tuple(recipes.names[node] for node in recipe.reads)
        layers.append(Layer(piece.name, module, reads, writes))
    return layers


def _carry_unused(model: nn.Module, layers: Sequence[Layer], before: Sequence[Layer]) -> None:
    """Give parameters that forward does not use to the layer with the nearest path.

    They are stored, saved and sent like the others, and get no gradient.
    """
    used = {id(p) for layer in (*before, *layers) for p in layer.parameters.values()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in used:
            nearest = max(layers, key=lambda layer: _common(layer.name, name))
            assert isinstance(nearest.module, GraphLayer)
            nearest.module.carry(parameter)
            nearest.__dict__.pop("parameters", None)


def _common(left: str, right: str) -> int:
    parts = zip(left.split("."), right.split("."), strict=False)
    return next((i for i, (a, b) in enumerate(parts) if a != b), len(left.split(".")))


_ADVICE = "evaluate the model without swapping it, or on a machine that holds it"

Token = tuple[str, str]


class Remembered(NamedTuple):
    tokens: list[Token]
    """One for each varying operation."""
    pieces: list[int]
    """The layer of each."""
    names: list[str]
    """The name of each one's value."""


def remember(graph: Graph, recipes: Recipes) -> Remembered:
    return Remembered(
        [_token(node) for node in graph.varying],
        [recipes.piece_of[node] for node in graph.varying],
        [recipes.names[node] for node in graph.varying],
    )


def _token(node: fx.Node) -> Token:
    stack = node.meta.get("nn_module_stack") or {}
    return str(node.target), next(reversed(stack), "")


def attach(
    graph: Graph, first: Remembered, layers: Sequence[Layer], input_names: Sequence[str]
) -> None:
    """Give each layer its operations in the other mode.

    Raises:
        AnalysisError: an operation needs a weight or a value that its layer does not have.
    """
    matched = _matched(first.tokens, [_token(node) for node in graph.varying])
    pieces = _pieces(matched, first.pieces, len(graph.varying), len(layers))
    recipes = Recipes(graph, pieces, input_names)
    channels = _Channels(graph, first, matched, layers, recipes)
    templates: dict[object, Template] = {}
    others = []
    for index, layer in enumerate(layers):
        recipe = recipes.recipe(index)
        key = recipe.key
        if key not in templates:
            templates[key] = Template(recipe)
        others.append(_other(graph, recipe, templates[key], layer, channels, recipes, index))
    for layer, other in zip(layers, others, strict=True):
        assert isinstance(layer.module, GraphLayer)
        layer.module.other = other


def _matched(first: Sequence[Token], second: Sequence[Token]) -> dict[int, int]:
    matcher = difflib.SequenceMatcher(None, first, second, autojunk=False)
    return {
        block.b + offset: block.a + offset
        for block in matcher.get_matching_blocks()
        for offset in range(block.size)
    }


def _pieces(
    matched: dict[int, int], piece_of: Sequence[int], count: int, layers: int
) -> list[Piece]:
    """Lay each operation into the layer of the last one before it that corresponds."""
    current, starts = 0, [0]
    for index in range(count):
        if index in matched:
            current = piece_of[matched[index]]
        while len(starts) <= current:
            starts.append(index)
    starts += [count] * (layers + 1 - len(starts))
    return [Piece(str(i), starts[i], starts[i + 1]) for i in range(layers)]


class _Channels:
    """Finds for each value that crosses layers a name under which training carries one."""

    def __init__(
        self,
        graph: Graph,
        first: Remembered,
        matched: dict[int, int],
        layers: Sequence[Layer],
        recipes: Recipes,
    ) -> None:
        self._layers = layers
        self._names: dict[fx.Node, str] = {}
        position = {node: index for index, node in enumerate(graph.varying)}
        taken: set[str] = set()
        crossing = [node for i in range(len(layers) - 1) for node in recipes.recipe(i).writes]
        readers = {
            node: [i for i in range(len(layers)) if node in recipes.recipe(i).reads]
            for node in crossing
        }
        for exact in (True, False):
            for node in crossing:
                if node in self._names:
                    continue
                source = matched.get(position[node])
                own = first.names[source] if source is not None else None
                written = layers[recipes.piece_of[node]].writes
                candidates = [own] if exact else list(written)
                for name in candidates:
                    if name in written and name not in taken and self._reach(name, readers[node]):
                        self._names[node] = name
                        taken.add(name)
                        break

    def _reach(self, name: str, readers: Sequence[int]) -> bool:
        return all(name in self._layers[reader].reads for reader in readers)

    def name(self, node: fx.Node) -> str:
        """Return the name of a value that crosses.

        Raises:
            AnalysisError: training carries nothing along that way.
        """
        if node not in self._names:
            raise AnalysisError(
                f"in its other mode the model carries a value between layers that it does not "
                f"carry otherwise, made at {place_of(node)}; {_ADVICE}"
            )
        return self._names[node]


def _other(
    graph: Graph,
    recipe: Recipe,
    template: Template,
    layer: Layer,
    channels: _Channels,
    recipes: Recipes,
    index: int,
) -> OtherMode:
    own = {id(tensor): name for name, tensor in (*layer.parameters.items(), *layer.buffers.items())}
    of_model = {id(buffer) for _, buffer in graph.exported.buffers.values()}
    folded = {name: b for name, b in layer.buffers.items() if id(b) not in of_model}
    arguments: list[str | int | Tensor] = []
    for node in recipe.parameters:
        parameter = graph.exported.parameters[node]
        if id(parameter) not in own:
            raise AnalysisError(
                f"in its other mode the model uses {node.name.removeprefix('p_model_')!r} in layer "
                f"{layer.name!r}, which does not hold it; {_ADVICE}"
            )
        arguments.append(own[id(parameter)])
    for node in recipe.buffers:
        tensor = recipes.buffer(node)
        arguments.append(own.get(id(tensor)) or _equal(tensor, folded) or tensor)
    for node in recipe.reads:
        name = recipes.names[node] if node in graph.exported.inputs else channels.name(node)
        if name not in layer.reads:
            raise AnalysisError(
                f"in its other mode the model reads {name!r} in layer {layer.name!r}, where it "
                f"does not otherwise; {_ADVICE}"
            )
        arguments.append(layer.reads.index(name))
    if index == len(recipes.pieces) - 1:
        return OtherMode(
            template, tuple(arguments), tuple(range(len(recipe.writes))), graph.exported.rebuild
        )
    made = {channels.name(node): position for position, node in enumerate(recipe.writes)}
    return OtherMode(template, tuple(arguments), tuple(made.get(name) for name in layer.writes))


def _equal(tensor: Tensor, folded: Mapping[str, Tensor]) -> str | None:
    """Return the name of the folded constant that has the same value."""
    for name, buffer in folded.items():
        if (
            buffer.shape == tensor.shape
            and buffer.dtype == tensor.dtype
            and not buffer.is_meta
            and not tensor.is_meta
            and torch.equal(buffer, tensor)
        ):
            return name
    return None
