"""Turns any model into a chain: export, fold constants, cut, and give each layer its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx, nn

from atomtrain.analysis.attention import simplify_attention
from atomtrain.analysis.chain import Layer
from atomtrain.analysis.constants import Constants
from atomtrain.analysis.cuts import Piece, find_pieces
from atomtrain.analysis.effects import live_nodes, written_by
from atomtrain.analysis.export import MANUAL, Exported, export, place_of
from atomtrain.analysis.graph_layer import GraphLayer, Mode, Recipe, Template
from atomtrain.analysis.micro_batch import Inputs, MicroBatch
from atomtrain.errors import AnalysisError

PREFIX = "model."
"""Path of the model within what is exported."""


class ExportedLayers(NamedTuple):
    """Layers of a model whose operations were exported."""

    layers: list[Layer]
    """The last one writes the tensors of the model's output, in order, or the loss."""
    rebuild: Callable[[Sequence[Any]], Any]
    """Makes the model's output from what the last layer writes."""


class Graph(NamedTuple):
    """An exported graph, reduced to what matters."""

    exported: Exported
    live: list[fx.Node]
    constants: Constants
    varying: list[fx.Node]
    """Live operations that are not constant: what the chain is made of."""
    outputs: tuple[fx.Node, ...]


def exported_layers(
    model: nn.Module, example: MicroBatch, inputs: Inputs, *, own_loss: bool
) -> ExportedLayers:
    """Return the layers of any model.

    Args:
        model: Weights may be on the meta device.
        example: One micro-batch; all later ones must have its shapes.
        inputs: Of the example.
        own_loss: The last layer writes the output's loss, not the output.

    Raises:
        AnalysisError: see `export`.
    """
    graph = read_graph(model, example, inputs, own_loss=own_loss)
    sources = set(graph.exported.parameters)
    pieces = find_pieces(graph.varying, model, PREFIX, sources)
    builder = _Builder(graph, pieces, inputs.tensor_names)
    mode = Mode(model)
    layers = [builder.layer(index, mode) for index in range(len(pieces))]
    _carry_unused(model, layers)
    return ExportedLayers(layers, graph.exported.rebuild)


def read_graph(
    model: nn.Module, example: MicroBatch, inputs: Inputs, *, own_loss: bool, grad: bool = True
) -> Graph:
    """Export the model and find what of it matters and what is constant."""
    exported = export(model, inputs.tensors(example), inputs.call, own_loss=own_loss, grad=grad)
    _unify(exported)
    live = live_nodes(exported.graph, exported.buffers)
    _check_writes(exported, live)
    constants = Constants(exported, live, set(model.state_dict(keep_vars=True)))
    simplify_attention(live, constants)
    live = live_nodes(exported.graph, exported.buffers)
    varying = [node for node in live if node not in constants.nodes]
    if not varying:
        raise AnalysisError(
            f"forward of {type(model).__name__} does nothing with the micro-batch or the weights"
        )
    [output] = [node for node in exported.graph.nodes if node.op == "output"]
    return Graph(exported, live, constants, varying, tuple(output.args[0]))


def _unify(exported: Exported) -> None:
    """Give a tensor that has several names one placeholder."""
    first: dict[int, fx.Node] = {}
    tensors: dict[fx.Node, Tensor] = {n: b for n, (_, b) in exported.buffers.items()}
    tensors.update(exported.parameters)
    for node, tensor in tensors.items():
        known = first.setdefault(id(tensor), node)
        if known is not node:
            node.replace_all_uses_with(known)


def _check_writes(exported: Exported, live: Sequence[fx.Node]) -> None:
    for node in live:
        for target in written_by(node):
            for kind, sources in (
                ("a parameter", exported.parameters),
                ("its input", exported.inputs),
            ):
                if target in sources:
                    raise AnalysisError(
                        f"forward changes {kind} in place at {place_of(node)}, which cannot be "
                        f"repeated; use an operation that returns a new tensor, {MANUAL}"
                    )


def _carry_unused(model: nn.Module, layers: Sequence[Layer]) -> None:
    """Give parameters that forward does not use to the layer with the nearest path.

    They are stored, saved and sent like the others, and get no gradient.
    """
    used = {id(p) for layer in layers for p in layer.parameters.values()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in used:
            nearest = max(layers, key=lambda layer: _common(layer.name, name))
            assert isinstance(nearest.module, GraphLayer)
            nearest.module.carry(parameter)
            nearest.__dict__.pop("parameters", None)


def _common(left: str, right: str) -> int:
    parts = zip(left.split("."), right.split("."), strict=False)
    return next((i for i, (a, b) in enumerate(parts) if a != b), len(left.split(".")))


class _Builder:
    """Makes the layers of the pieces of a graph; identical ones get one template."""

    def __init__(self, graph: Graph, pieces: Sequence[Piece], input_names: Sequence[str]) -> None:
        self._graph, self._pieces = graph, pieces
        self._order = {node: index for index, node in enumerate(graph.live)}
        self._piece_of: dict[fx.Node, int] = {}
        for index, piece in enumerate(pieces):
            for node in graph.varying[piece.start : piece.stop]:
                self._piece_of[node] = index
        self._names: dict[fx.Node, str] = {
            node: input_names[position] for node, position in graph.exported.inputs.items()
        }
        for node, index in self._piece_of.items():
            self._names[node] = f"{pieces[index].name}/{node.name}"
        self._last_reader = self._last_readers()
        self._templates: dict[Any, Template] = {}

    def _last_readers(self) -> Mapping[fx.Node, int]:
        readers: dict[fx.Node, int] = {}
        for node in self._graph.varying:
            for source in node.all_input_nodes:
                readers[source] = max(readers.get(source, 0), self._piece_of[node])
        for node in self._graph.outputs:
            readers[node] = len(self._pieces)
        return readers

    def layer(self, index: int, mode: Mode) -> Layer:
        """Return the layer of a piece."""
        recipe = self.recipe(index)
        key = recipe.key
        if key not in self._templates:
            self._templates[key] = Template(recipe)
        exported = self._graph.exported
        module = GraphLayer(
            self._templates[key],
            [exported.parameters[node] for node in recipe.parameters],
            [self._buffer(node) for node in recipe.buffers],
            mode,
        )
        return Layer(
            self._pieces[index].name,
            module,
            tuple(self._names[node] for node in recipe.reads),
            self._writes(index, recipe),
        )

    def _writes(self, index: int, recipe: Recipe) -> tuple[str, ...]:
        if index == len(self._pieces) - 1:
            return tuple(f"output/{position}" for position in range(len(recipe.writes)))
        return tuple(self._names[node] for node in recipe.writes)

    def _buffer(self, node: fx.Node) -> Tensor:
        exported = self._graph.exported
        if node in exported.buffers:
            return exported.buffers[node][1]
        return exported.literals[node] if node in exported.literals else (
            self._graph.constants.held(node)
        )  # fmt: skip

    def recipe(self, index: int) -> Recipe:
        """Return what a piece takes and makes."""
        exported, constants = self._graph.exported, self._graph.constants
        piece = self._pieces[index]
        calls = set(self._graph.varying[piece.start : piece.stop])
        last = index == len(self._pieces) - 1
        waiting = sorted(calls, key=self._order.__getitem__)
        outside: dict[fx.Node, None] = {}
        buffers: set[fx.Node] = set()
        # The operations that are made anew here come to the piece's own as they are found.
        needed = [s for node in waiting for s in node.all_input_nodes]
        needed += self._graph.outputs if last else ()
        while needed:
            node = needed.pop(0)
            if node in calls:
                continue
            if constants.is_remade(node):
                calls.add(node)
                needed.extend(node.all_input_nodes)
                continue
            if node in constants.nodes or node in exported.buffers:
                buffers.add(node)
            outside[node] = None
        ordered = tuple(sorted(calls, key=self._order.__getitem__))
        if last:
            writes = self._graph.outputs
        else:
            writes = tuple(
                node
                for node in ordered
                if self._piece_of.get(node) == index and self._last_reader.get(node, 0) > index
            )
        return Recipe(
            ordered,
            tuple(node for node in outside if node in exported.parameters),
            tuple(node for node in outside if node in buffers),
            tuple(
                node for node in outside if node not in buffers and node not in exported.parameters
            ),
            writes,
        )
