"""An exported graph, and what each run of its operations takes and makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn

from atomtrain.analysis.export.conditions import MANUAL
from atomtrain.analysis.export.constants import Constants, simplify_attention
from atomtrain.analysis.export.export import Exported, export
from atomtrain.analysis.export.flattening import place_of
from atomtrain.analysis.export.functions import live_nodes, storages_of, written_by
from atomtrain.analysis.layers.cuts import Piece
from atomtrain.analysis.layers.front import Rest
from atomtrain.analysis.layers.graph_layer import Recipe
from atomtrain.analysis.layers.limits import Limit, take_limits
from atomtrain.analysis.layers.micro_batch import Inputs
from atomtrain.analysis.layers.own_ending import Inner
from atomtrain.errors import AnalysisError


class Graph(NamedTuple):
    exported: Exported
    live: list[fx.Node]
    constants: Constants
    varying: list[fx.Node]
    """Live operations that are not constant: what the chain is made of."""
    outputs: tuple[fx.Node, ...]
    limits: list[Limit]
    """What forward holds parameters within; its operations for that are taken out."""


def read_graph(
    model: nn.Module,
    tensors: Sequence[Tensor],
    inputs: Inputs | Rest | Inner,
    *,
    own_loss: bool,
    grad: bool,
    device: torch.device,
    as_eager: bool = False,
) -> Graph:
    """Export the model (see `export`) and find what of it matters and what is constant.

    Raises:
        AnalysisError: it cannot be exported, or forward does nothing with micro-batch or weights.
    """
    exported = export(
        model, tensors, inputs.call, own_loss=own_loss, grad=grad, device=device, as_eager=as_eager
    )
    _unify(exported)
    limits = take_limits(exported)
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
    return Graph(exported, live, constants, varying, tuple(output.args[0]), limits)


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
    """Refuse what writes to a parameter or an input, or to a part of one."""
    kinds = {
        key: kind
        for kind, sources in (
            ("a parameter", exported.parameters),
            ("its input", exported.inputs),
        )
        for source in sources
        for key in storages_of(source)
    }
    for node in live:
        for target in written_by(node):
            for key in storages_of(target):
                if kind := kinds.get(key):
                    raise AnalysisError(
                        f"forward changes {kind} in place at {place_of(node)}, which cannot be "
                        f"repeated; use an operation that returns a new tensor, {MANUAL}"
                    )


class Recipes:
    def __init__(self, graph: Graph, pieces: Sequence[Piece], input_names: Sequence[str]) -> None:
        self._graph, self.pieces = graph, pieces
        self._order = {node: index for index, node in enumerate(graph.live)}
        self.piece_of: dict[fx.Node, int] = {}
        """The piece of each operation that varies."""
        for index, piece in enumerate(pieces):
            for node in graph.varying[piece.start : piece.stop]:
                self.piece_of[node] = index
        self.names: dict[fx.Node, str] = {
            node: input_names[position] for node, position in graph.exported.inputs.items()
        }
        """The name of each value that may cross from piece to piece, inputs included."""
        for node, index in self.piece_of.items():
            self.names[node] = f"{pieces[index].name}/{node.name}"
        self._last_reader = self._last_readers()
        self._made: dict[int, Recipe] = {}

    def _last_readers(self) -> Mapping[fx.Node, int]:
        readers: dict[fx.Node, int] = {}
        for node in self._graph.varying:
            for source in node.all_input_nodes:
                readers[source] = max(readers.get(source, 0), self.piece_of[node])
        for node in self._graph.outputs:
            readers[node] = len(self.pieces)
        return readers

    def buffer(self, node: fx.Node) -> Tensor:
        """Return the tensor behind a node that is a buffer of some layer."""
        exported = self._graph.exported
        if node in exported.buffers:
            return exported.buffers[node][1]
        if node in exported.literals:
            return exported.literals[node]
        return self._graph.constants.held(node)

    def recipe(self, index: int) -> Recipe:
        if index not in self._made:
            self._made[index] = self._make(index)
        return self._made[index]

    def _make(self, index: int) -> Recipe:
        exported, constants = self._graph.exported, self._graph.constants
        piece = self.pieces[index]
        calls = set(self._graph.varying[piece.start : piece.stop])
        last = index == len(self.pieces) - 1
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
                if self.piece_of.get(node) == index and self._last_reader.get(node, 0) > index
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
