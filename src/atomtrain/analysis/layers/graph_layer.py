"""Layers made of a run of operations: one template for all identical ones, own weights for each.

What a run takes and makes is its *recipe*; see `graph_runs.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from atomtrain.analysis.layers.direct_calls import function_of
from atomtrain.errors import ConfigError

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
        self._function = function_of(self.graph)

    def run(self, device: torch.device, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """Return what the operations write; constants are made on `device`."""
        result: tuple[Any, ...] = self._function(device, *tensors)
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
        self._carried: list[str] = []
        for index, parameter in enumerate(parameters):
            self.register_parameter(f"p{index}", parameter)
            self._arguments.append(f"p{index}")
        for index, buffer in enumerate(buffers):
            self.register_buffer(f"b{index}", buffer, persistent=False)
            self._arguments.append(f"b{index}")

    @property
    def names(self) -> Sequence[str]:
        """Names of the parameters and buffers that the operations take, in their order."""
        return self._arguments

    def carry(self, parameter: nn.Parameter) -> None:
        """Take along a parameter that no operation uses, so that it is stored like the others."""
        name = f"u{len(self._carried)}"
        self.register_parameter(name, parameter)
        self._carried.append(name)

    def forward(self, *values: Any) -> tuple[Any, ...]:
        names = (*self._arguments, *self._carried)
        return self.run({name: getattr(self, name) for name in names}, values)

    def run(self, tensors: Mapping[str, Tensor], values: Sequence[Any]) -> tuple[Any, ...]:
        """Return what `forward` does with these as its parameters and buffers, by name."""
        if not self.mode.is_other:
            given: list[Any] = [tensors[name] for name in self._arguments]
            given += values
            return self.template.run(_device_of(given), given)
        if self.other is None:
            raise ConfigError(
                "the model is in another mode than when it was swapped; call model.train() or "
                "model.eval() first, as then, or swap it again"
            )
        device = _device_of([*tensors.values(), *values])
        given = []
        for argument in self.other.arguments:
            if isinstance(argument, str):
                given.append(tensors[argument])
            else:
                given.append(values[argument] if isinstance(argument, int) else argument.to(device))
        written = self.other.template.run(device, given)
        return tuple(
            torch.empty(0, device=device) if index is None else written[index]
            for index in self.other.results
        )


def _device_of(values: Sequence[Any]) -> torch.device:
    return next((v.device for v in values if isinstance(v, Tensor)), torch.device("cpu"))
