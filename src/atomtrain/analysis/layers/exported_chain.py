"""Turns any model into a chain: export, fold constants, cut, and give each layer its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from atomtrain.analysis.layers.chain import Layer
from atomtrain.analysis.layers.cuts import find_pieces
from atomtrain.analysis.layers.eval_mode import attach, remember
from atomtrain.analysis.layers.front import Rest
from atomtrain.analysis.layers.graph_layer import GraphLayer, Mode, Template
from atomtrain.analysis.layers.graph_runs import Graph, Recipes, read_graph
from atomtrain.analysis.layers.image_tokens import ImageTokens, image_tokens
from atomtrain.analysis.layers.micro_batch import Inputs, MicroBatch
from atomtrain.errors import ConfigError

PREFIX = "model."
"""Path of the model within what is exported."""


class ExportedLayers(NamedTuple):
    """Layers of a model whose operations were exported."""

    layers: list[Layer]
    """The last one writes the tensors of the model's output, in order, or the loss."""
    rebuild: Callable[[Sequence[Any]], Any]
    """Makes the model's output from what the last layer writes."""
    ready: Callable[[bool], None]
    """`ready(training)` prepares the layers for a step (`True`) or for evaluation."""
    image_tokens: list[ImageTokens]
    """What must hold of each micro-batch."""


def exported_layers(
    model: nn.Module,
    example: MicroBatch,
    inputs: Inputs | Rest,
    *,
    own_loss: bool,
    device: torch.device,
    before: Sequence[Layer] = (),
) -> ExportedLayers:
    """Return the layers of any model.

    Args:
        model: Weights may be on the meta device.
        example: One micro-batch; all later ones must have its shapes.
        inputs: Of the example.
        own_loss: The last layer writes the output's loss, not the output.
        device: Where the layers will run.
        before: Layers that come first, and hold parameters of the model.

    Raises:
        AnalysisError: see `export`.
    """
    tensors = inputs.tensors(example)
    graph = read_graph(model, tensors, inputs, own_loss=own_loss, grad=True, device=device)
    pieces = find_pieces(graph.varying, model, PREFIX, set(graph.exported.parameters))
    recipes = Recipes(graph, pieces, inputs.tensor_names)
    mode = Mode(model)
    layers = _layers(graph, recipes, mode)
    _carry_unused(model, layers, before)
    first = remember(graph, recipes)
    shapes = [torch.empty_like(tensor, device="meta") for tensor in tensors]
    own = tuple(layers)  # the caller may put another layer in the list
    attached = False

    def ready(training: bool) -> None:
        nonlocal attached
        if not mode.is_other:
            return
        if training:
            raise ConfigError(
                f"the model was swapped with training={mode.training} and has "
                f"training={model.training} now; call model.train({mode.training}), or swap it "
                "again"
            )
        if not attached:
            other = read_graph(model, shapes, inputs, own_loss=own_loss, grad=False, device=device)
            attach(other, first, own, inputs.tensor_names)
            attached = True

    exported = graph.exported
    tokens = image_tokens(model, exported.graph, exported.inputs, inputs.tensor_names)
    return ExportedLayers(layers, exported.rebuild, ready, tokens)


def _layers(graph: Graph, recipes: Recipes, mode: Mode) -> list[Layer]:
    """Return the layers; identical ones get one template."""
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
