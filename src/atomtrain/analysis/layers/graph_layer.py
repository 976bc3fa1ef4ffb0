"""Layers made of a run of operations: one template for all identical ones, own weights for each.

What a run takes and makes, its *recipe*, is found in the exported graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from atomtrain.analysis.export.conditions import MANUAL
from atomtrain.analysis.export.constants import Constants, simplify_attention
from atomtrain.analysis.export.export import Exported, export, place_of
from atomtrain.analysis.export.functions import live_nodes, written_by
from atomtrain.analysis.layers.cuts import Piece
from atomtrain.analysis.layers.micro_batch import Inputs
from atomtrain.errors import AnalysisError, ConfigError

Key = tuple[Any, ...]


class Recipe(NamedTuple):
    calls: tuple[fx.Node, ...]
    """In the order of execution."""
    parameters: tuple[fx.Node, ...]
    buffers: tuple[fx.Node, ...]
    reads: tuple[fx.Node, ...]
    writes: tuple[fx.Node, ...]

    @property
    def key(self) -> Key:
        """The operations without names, equal for equal work."""
        numbers = {
            node: index
            for index, node in enumerate(
                (*self.parameters, *self.buffers, *self.reads, *self.calls)
            )
        }
        sizes = (len(self.parameters), len(self.buffers), len(self.reads))
        steps = []
        for call in self.calls:
            arguments = fx.node.map_arg((call.args, call.kwargs), lambda n: _Number(numbers[n]))
            steps.append((str(call.target), repr(arguments), bool(call.meta.get("no_grad"))))
        return (sizes, tuple(steps), tuple(numbers[node] for node in self.writes))


class _Number(NamedTuple):
    n: int


class Template:
    """Compiled operations: `run(device, *parameters, *buffers, *reads) -> writes`."""

    def __init__(self, recipe: Recipe) -> None:
        self.graph, self.device = _graph_of(recipe)
        self._module = fx.GraphModule(nn.Module(), self.graph)

    def run(self, device: torch.device, tensors: Sequence[Any]) -> tuple[Any, ...]:
        result: tuple[Any, ...] = self._module.forward(device, *tensors)
        return result


def _graph_of(recipe: Recipe) -> tuple[fx.Graph, fx.Node]:
    graph = fx.Graph()
    device = graph.placeholder("device")
    env: dict[fx.Node, fx.Node] = {}
    groups = (("p", recipe.parameters), ("b", recipe.buffers), ("x", recipe.reads))
    for letter, nodes in groups:
        for index, node in enumerate(nodes):
            env[node] = graph.placeholder(f"{letter}{index}")
            env[node].meta["val"] = node.meta.get("val")
    was: fx.Node | None = None
    for call in recipe.calls:
        no_grad = bool(call.meta.get("no_grad"))
        if no_grad and was is None:
            was = graph.call_function(torch.is_grad_enabled)
            graph.call_function(torch._C._set_grad_enabled, (False,))
        if not no_grad and was is not None:
            graph.call_function(torch._C._set_grad_enabled, (was,))
            was = None
        args, kwargs = fx.node.map_arg((call.args, call.kwargs), lambda n: env[n])
        args, kwargs = fx.node.map_aggregate(
            (args, kwargs), lambda a: device if isinstance(a, torch.device) else a
        )
        assert callable(call.target)
        env[call] = graph.call_function(call.target, args, kwargs)
        env[call].meta = {key: call.meta.get(key) for key in ("val", "stack_trace")}
    if was is not None:
        graph.call_function(torch._C._set_grad_enabled, (was,))
    graph.output(tuple(env[node] for node in recipe.writes))
    return graph, device


class Mode:
    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.training = model.training
        """The mode that was exported."""

    @property
    def is_other(self) -> bool:
        return self._model.training != self.training


class OtherMode(NamedTuple):
    template: Template
    arguments: tuple[str | int | Tensor, ...]
    """Each one a name of the layer's tensors, a position among what it reads, or a constant."""
    results: tuple[int | None, ...]
    """For each value that the layer writes the template's result, or `None` if nobody reads it."""
    rebuild: Callable[[Sequence[Any]], Any] = tuple
    """Makes the model's output, if this is the last layer."""


class GraphLayer(nn.Module):
    """Runs a template with the model's own parameters.

    Parameters are called `p0`, `p1`, ..., those that forward does not use `u0`, ..., buffers `b0`,
    ..., so that identical layers look identical.
    """

    fixed_operations = True

    def __init__(
        self,
        template: Template,
        parameters: Sequence[nn.Parameter],
        buffers: Sequence[Tensor],
        mode: Mode,
    ) -> None:
        super().__init__()
        self.template, self.mode = template, mode
        self.other: OtherMode | None = None
        self._arguments: list[str] = []
        for index, parameter in enumerate(parameters):
            self.register_parameter(f"p{index}", parameter)
            self._arguments.append(f"p{index}")
        for index, buffer in enumerate(buffers):
            self.register_buffer(f"b{index}", buffer, persistent=False)
            self._arguments.append(f"b{index}")

    def carry(self, parameter: nn.Parameter) -> None:
        """Take along a parameter that no operation uses, so that it is stored like the others."""
        carried = sum(name.startswith("u") for name in self._parameters)
        self.register_parameter(f"u{carried}", parameter)

    def forward(self, *values: Any) -> tuple[Any, ...]:
        tensors = [getattr(self, name) for name in self._arguments]
        device = _device_of([*tensors, *values])
        if not self.mode.is_other:
            return self.template.run(device, [*tensors, *values])
        if self.other is None:
            raise ConfigError(
                "the model is in another mode than when it was swapped; call model.train() or "
                "model.eval() first, as then, or swap it again"
            )
        given: list[Any] = []
        for argument in self.other.arguments:
            if isinstance(argument, str):
                given.append(getattr(self, argument))
            else:
                given.append(values[argument] if isinstance(argument, int) else argument.to(device))
        written = self.other.template.run(device, given)
        return tuple(
            torch.empty(0, device=device) if index is None else written[index]
            for index in self.other.results
        )


def _device_of(values: Sequence[Any]) -> torch.device:
    return next((v.device for v in values if isinstance(v, Tensor)), torch.device("cpu"))


class Graph(NamedTuple):
    exported: Exported
    live: list[fx.Node]
    constants: Constants
    varying: list[fx.Node]
    """Live operations that are not constant: what the chain is made of."""
    outputs: tuple[fx.Node, ...]


def read_graph(
    model: nn.Module,
    tensors: Sequence[Tensor],
    inputs: Inputs,
    *,
    own_loss: bool,
    grad: bool,
    device: torch.device,
) -> Graph:
    """Export the model and find what of it matters and what is constant.

    Raises:
        AnalysisError: it cannot be exported, or forward does nothing with micro-batch or weights.
    """
    exported = export(model, tensors, inputs.call, own_loss=own_loss, grad=grad, device=device)
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
