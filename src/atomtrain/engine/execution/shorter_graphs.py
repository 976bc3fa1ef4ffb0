"""Makes a layer's graph shorter: each operation costs the thread that launches it.

Autograd's operations look at the same result several times in the same way, and look at what was
just looked at. Each such look costs as much as a small operation, and is left out.

Of each part of a tensor autograd makes a gradient of the whole, zero elsewhere, and adds the two:
as where half of each head is turned for a rotary embedding. Put beside each other they are the same
numbers, once zero is added, which makes zeros positive: two operations in place of seven.

Programs turn each weight before a product with it, and give tables for rotary embeddings one more
dimension. Such looks at parameters and buffers lie in the same slot in every step, so they are made
once for all micro-batches.

Every result keeps its bits and its strides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from atomtrain.analysis.layers.direct_calls import function_of

aten = torch.ops.aten
_RESHAPES = frozenset({aten.view.default, aten._unsafe_view.default})
LOOKS = _RESHAPES | {
    aten.t.default, aten.transpose.int, aten.unsqueeze.default, aten.squeeze.dim,
    aten.expand.default, aten.slice.Tensor, aten.permute.default,
}  # fmt: skip
"""Operations whose results lie in their argument's memory, and depend on nothing else."""


def leave_out_views(graph: fx.Graph) -> None:
    """Look at each result once in each way, and at once in the last one of several."""
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if _is_itself(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            continue
        if node.target not in LOOKS or node.kwargs:
            continue
        if node.target in _RESHAPES:
            _look_at_once(node)
            if _has_shape(node.args[0], node.meta["val"].shape):
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
                continue
        key = (node.target, fx.node.map_aggregate(node.args, _hashable))
        known = seen.setdefault(key, node)
        if known is not node:
            node.replace_all_uses_with(known)
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if node.target in LOOKS and not node.users:
            graph.erase_node(node)


def _is_itself(node: fx.Node) -> bool:
    """Return whether an operation's result is its argument: a power of 1, for one."""
    if node.target is not aten.pow.Tensor_Scalar or node.args[1] != 1:
        return False
    value = _value(node.args[0])
    return value is not None and value.is_floating_point() and value.is_contiguous()


def _look_at_once(node: fx.Node) -> None:
    """Reshape what was reshaped into the argument: the same where all of it is contiguous."""
    shape = node.meta["val"].shape
    of = node.args[0]
    while isinstance(of, fx.Node) and of.target in _RESHAPES:
        value = _value(of.args[0])
        if value is None or not value.is_contiguous():
            break
        of = of.args[0]
    node.args = (of, list(shape))


def _has_shape(node: Any, shape: torch.Size) -> bool:
    value = _value(node)
    return value is not None and value.shape == shape


def _value(node: Any) -> Tensor | None:
    """Return the tensor without data that was traced."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def _hashable(argument: Any) -> Any:
    return tuple(argument) if isinstance(argument, list) else argument


class _Part(NamedTuple):
    """A gradient of a slice."""

    node: fx.Node
    size: tuple[int, ...]
    """Of the whole."""
    dim: int
    start: int
    stop: int


def join_slices(graph: fx.Graph) -> None:
    """Put gradients of slices together that are added, and are the whole of a tensor."""
    for node in list(graph.nodes):
        if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
            continue
        slices = list(node.all_input_nodes)
        one, other = (_part(argument) for argument in node.args)
        if one is None or other is None:
            continue
        first, second = (one, other) if one.start <= other.start else (other, one)
        if not (_are_whole(first, second) and _lie_alike(first, second, node)):
            continue
        with graph.inserting_before(node):
            parts = [first.node, second.node]
            joined = graph.call_function(aten.cat.default, (parts, first.dim))
            whole = graph.call_function(aten.add_.Scalar, (joined, 0.0))
        joined.meta = whole.meta = dict(node.meta)
        node.replace_all_uses_with(whole)
        graph.erase_node(node)
        for part in slices:
            if not part.users:
                graph.erase_node(part)


def _part(node: Any) -> _Part | None:
    if not isinstance(node, fx.Node) or node.target is not aten.slice_backward.default:
        return None
    arguments: Any = node.args
    gradient, size, dim, start, stop, step = arguments
    value = node.meta["val"]
    if step != 1 or start < 0 or stop < 0 or not value.is_floating_point():
        return None
    return _Part(gradient, tuple(size), dim % len(size), start, min(stop, size[dim]))


def _are_whole(first: _Part, second: _Part) -> bool:
    alike = (first.size, first.dim) == (second.size, second.dim)
    whole = first.start == 0 and first.stop == second.start and second.stop == first.size[first.dim]
    return alike and whole and 0 < first.stop < second.stop


def _lie_alike(first: _Part, second: _Part, node: fx.Node) -> bool:
    """Return whether the parts, put together, have type and strides of what was added."""
    found = torch.cat([first.node.meta["val"], second.node.meta["val"]], first.dim)
    expected = node.meta["val"]
    return found.dtype is expected.dtype and found.stride() == expected.stride()


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
