"""Looks at parameters and buffers once for all micro-batches, not in each.

Programs turn each weight before a product with it, and give tables for rotary embeddings one more
dimension. Such looks lie where the tensor lies, which is the same slot in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from atomtrain.analysis.layers.direct_calls import function_of
from atomtrain.engine.execution.shorter_graphs import LOOKS


def take_looks_out(graphs: Sequence[fx.Graph], stays: int) -> Callable[..., Sequence[Any]]:
    """Have graphs take looks as arguments; return what makes them.

    Args:
        graphs: Each has a run as its first argument, then so many parameters and buffers. It will
            take the looks behind these.
        stays: How many.

    Returns:
        `looks(*stays)`: parameters and buffers, then all that graphs look at in them.
    """
    found: dict[Any, fx.Node] = {}
    looking = [_looks(graph, stays) for graph in graphs]
    for looks in looking:
        found.update(looks)
    ready = fx.Graph()
    given = [ready.placeholder(f"given_{number}") for number in range(stays)]
    made = []
    for (number, *_), node in found.items():
        made.append(ready.node_copy(node, {node.all_input_nodes[0]: given[number]}.__getitem__))
    ready.output((*given, *made))
    for graph, looks in zip(graphs, looking, strict=True):
        before = [node for node in graph.nodes if node.op == "placeholder"][stays]
        for number, key in reversed([*enumerate(found)]):
            with graph.inserting_after(before):
                argument = graph.placeholder(f"look_{number}")
            if key in looks:
                looks[key].replace_all_uses_with(argument)
                graph.erase_node(looks[key])
    return function_of(ready)


def _looks(graph: fx.Graph, stays: int) -> dict[Any, fx.Node]:
    """Return the looks at the first arguments behind the run, by what they are."""
    arguments = [node for node in graph.nodes if node.op == "placeholder"][1 : stays + 1]
    numbers = {node: number for number, node in enumerate(arguments)}
    found = {}
    for node in graph.nodes:
        if node.target in LOOKS and not node.kwargs and node.args[0] in numbers:
            shape = fx.node.map_aggregate(node.args[1:], _hashable)
            found[numbers[node.args[0]], node.target, shape] = node
    return found


def _hashable(argument: Any) -> Any:
    return tuple(argument) if isinstance(argument, list) else argument
