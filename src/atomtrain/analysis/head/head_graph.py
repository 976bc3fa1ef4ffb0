"""Rewrites a graph of torch operations: linear, reshape, cross-entropy becomes one operation.

Between linear and cross-entropy may stand what torch and models put there: casts to float32, views
and slices of rows, constant factors. Each is applied to the hidden state instead of the logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from atomtrain.analysis.head.lazy_logits import LazyLogits
from atomtrain.analysis.head.pieces import OPERATION
from atomtrain.errors import AnalysisError

_aten = torch.ops.aten
_LOSS = _aten.cross_entropy_loss.default
_CHECK = _aten._assert_tensor_metadata.default
_COPIES = (_aten.contiguous.default, _aten.clone.default, _aten.alias.default)
_CASTS = (_aten.to.dtype, _aten.to.dtype_layout, _aten._to_copy.default)
_VIEWS = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)
_FLATTEN, _SLICE = _aten.flatten.using_ints, _aten.slice.Tensor
_FACTORS = (_aten.mul.Tensor, _aten.div.Tensor, _aten.mul.Scalar, _aten.div.Scalar)
_PRODUCTS = (_aten.matmul.default, _aten.mm.default)
_PIECES = 4  # their position among the arguments of OPERATION
_REDUCTIONS = {1: "mean", 2: "sum"}


class _Linear(NamedTuple):
    hidden: fx.Node
    weight: fx.Node
    transposed: bool
    """The weight is `[D, V]`, not `[V, D]`."""
    bias: fx.Node | None


def split_graph(source: fx.Graph, pieces: int) -> fx.Graph:
    """Return a copy of the graph with each cross-entropy of a linear layer computed in pieces.

    Those that are in pieces already get the new number of pieces; 1 leaves the others as they are.

    Args:
        source: As `torch.export` makes it, before decomposition, its nodes with `meta["val"]`.
        pieces: At least 1.

    Raises:
        AnalysisError: there is no cross-entropy, or it is not that of a linear layer's output (for
            more than 1 piece).
    """
    graph = _copy(source)
    split = [node for node in graph.nodes if node.target is OPERATION]
    for node in split:
        node.args = (*node.args[:_PIECES], pieces, *node.args[_PIECES + 1 :])
    losses = [node for node in graph.nodes if node.target is _LOSS] if pieces > 1 else []
    if pieces > 1 and not losses and not split:
        raise _cannot(
            "it does not call torch.nn.functional.cross_entropy where its operations can be seen"
        )
    for loss in losses:
        _replace(graph, loss, pieces)
    graph.lint()
    return graph


def with_lazy_logits(source: fx.Graph, pieces: int) -> fx.Graph:
    """Return a copy of the graph with lazy logits for each output of a linear layer.

    Raises:
        AnalysisError: no output is that of a linear layer, or it is used otherwise, too.
    """
    graph = _copy(source)
    [output] = [node for node in graph.nodes if node.op == "output"]
    found = 0
    for logits in list(output.all_input_nodes):
        path = [logits]
        while path[-1].target in (*_COPIES, *_CASTS) and _keeps_rows(path[-1]):
            path.append(_node(path[-1], 0))
        linear = _as_linear(path[-1])
        if linear is None:
            continue
        for node, reader in zip(path, [output, *path], strict=False):
            _require_only_reader(node, reader)
        with graph.inserting_before(output):
            weight = linear.weight
            if linear.transposed:
                weight = graph.call_function(_aten.t.default, (weight,))
            dtype = _value(logits).dtype
            lazy = graph.call_function(
                LazyLogits, (linear.hidden, weight, linear.bias, pieces, dtype)
            )
        output.replace_input_with(logits, lazy)
        _erase(graph, path)
        found += 1
    if not found:
        raise _cannot("the model's output is not that of a linear layer")
    graph.lint()
    return graph


def _copy(source: fx.Graph) -> fx.Graph:
    graph = fx.Graph()
    graph.output(graph.graph_copy(source, {}))
    graph.set_codegen(source._codegen)
    return graph


def _erase(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    for node in nodes:
        for check in list(node.users):
            graph.erase_node(check)
        graph.erase_node(node)


class _Found(NamedTuple):
    linear: _Linear
    path: list[fx.Node]
    """From cross-entropy back to the linear node, that one included."""
    several: bool
    """The logits are `[B, V, T]`; the first node of the path transposes them."""


def _find(loss: fx.Node, given: Mapping[str, Any]) -> _Found:
    if given["weight"] is not None:
        raise _cannot("its cross_entropy weighs the classes")
    if given["reduction"] not in _REDUCTIONS:
        raise _cannot("its cross_entropy does not reduce to one number")
    if _value(given["target"]).is_floating_point():
        raise _cannot("its cross_entropy takes probabilities instead of labels")
    node: fx.Node = given["self"]
    path: list[fx.Node] = []
    several = _value(node).ndim > 2
    if several:
        if not _moves_classes(node):
            raise _cannot(f"{_name(node)} stands before cross_entropy")
        path.append(node)
        node = _node(node, 0)
    while (linear := _as_linear(node)) is None:
        if not _keeps_rows(node):
            raise _cannot(f"{_name(node)} stands between its linear layer and cross_entropy")
        path.append(node)
        node = _node(node, 0)
    path.append(node)
    for node, reader in zip(path, [loss, *path], strict=False):
        _require_only_reader(node, reader)
    if linear.bias is not None and any(node.target in _FACTORS for node in path):
        raise _cannot("its logits have a bias and are multiplied by a constant")
    return _Found(linear, path, several)


def _replace(graph: fx.Graph, loss: fx.Node, pieces: int) -> None:
    given = _arguments(loss)
    (hidden, weight, transposed, bias), path, several = _find(loss, given)
    labels = given["target"]
    width = _value(hidden).shape[-1]
    with graph.inserting_before(loss):
        for node in reversed(path[several:-1]):
            hidden = _on_hidden(graph, node, hidden, width)
        if several:
            hidden = graph.call_function(_aten.reshape.default, (hidden, [-1, width]))
            labels = graph.call_function(_aten.reshape.default, (labels, [-1]))
        if transposed:
            weight = graph.call_function(_aten.t.default, (weight,))
        options = (given["ignore_index"], given["label_smoothing"], _REDUCTIONS[given["reduction"]])
        result = graph.call_function(OPERATION, (hidden, weight, bias, labels, pieces, *options))
        if _value(loss).dtype.itemsize < 4:  # what follows may expect the type it was made for
            result = graph.call_function(_aten.to.dtype, (result, _value(loss).dtype))
        result.meta["val"] = _value(loss)
    loss.replace_all_uses_with(result)
    _erase(graph, (loss, *path))


def _as_linear(node: fx.Node) -> _Linear | None:
    if node.target is _aten.linear.default:
        given = _arguments(node)
        return _Linear(given["input"], given["weight"], False, given["bias"])
    if node.target in _PRODUCTS and _value(_node(node, 1)).ndim == 2:
        return _Linear(_node(node, 0), _node(node, 1), True, None)
    if node.target is _aten.addmm.default and not node.kwargs and _value(_node(node, 0)).ndim == 1:
        return _Linear(_node(node, 1), _node(node, 2), True, _node(node, 0))
    return None


def _keeps_rows(node: fx.Node) -> bool:
    """Return whether the node does to the logits what can be done to the hidden state instead."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    before, after = _value(node.args[0]), _value(node)
    if node.target in _COPIES:
        return True
    if node.target in _CASTS:
        widens = before.dtype.itemsize < 4 and after.dtype == torch.float32
        return widens or after.dtype == before.dtype
    if node.target in _FACTORS:
        return isinstance(node.args[1], int | float)
    if node.target in (*_VIEWS, _FLATTEN, _SLICE):
        return before.ndim > 0 < after.ndim and before.shape[-1] == after.shape[-1]
    return False


def _on_hidden(graph: fx.Graph, node: fx.Node, hidden: fx.Node, width: int) -> fx.Node:
    if node.target in (*_COPIES, *_CASTS):
        return hidden  # the sums are in float32 anyway
    if node.target in _FACTORS:
        return graph.call_function(node.target, (hidden, *node.args[1:]))
    if node.target is _SLICE:
        given = _arguments(node)
        dim = given["dim"] % _value(_node(node, 0)).ndim
        if dim == _value(node).ndim - 1:
            return hidden  # all of the vocabulary
        ends = (given["start"], given["end"], given["step"])
        return graph.call_function(_SLICE, (hidden, dim, *ends))
    rows = list(_value(node).shape[:-1])
    return graph.call_function(_aten.reshape.default, (hidden, [*rows, width]))


def _moves_classes(node: fx.Node) -> bool:
    """Return whether the node makes `[B, V, T]` of `[B, T, V]`."""
    if _value(node).ndim != 3:
        return False
    if node.target is _aten.transpose.int:
        return {dim % 3 for dim in node.args[1:]} == {1, 2}  # type: ignore[operator]
    if node.target is _aten.permute.default:
        return [dim % 3 for dim in node.args[1]] == [0, 2, 1]  # type: ignore
    return False


def _require_only_reader(node: fx.Node, reader: fx.Node) -> None:
    for user in node.users:
        if user is not reader and user.target is not _CHECK:
            raise _cannot(
                f"its logits are also used by {_name(user)}, so all of them are needed at once"
            )


def _arguments(node: fx.Node) -> dict[str, Any]:
    schema = node.target._schema  # type: ignore[union-attr]
    named = {argument.name: argument.default_value for argument in schema.arguments}
    given = dict(zip(named, node.args, strict=False))
    return {**named, **given, **node.kwargs}


def _node(node: fx.Node, index: int) -> fx.Node:
    argument = node.args[index]
    assert isinstance(argument, fx.Node)
    return argument


def _value(node: fx.Node) -> Tensor:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        raise _cannot(f"its graph does not say what {node.name} is; export it with torch.export")
    return value


def _name(node: fx.Node) -> str:
    return "the model's output" if node.op == "output" else str(node.target)


def _cannot(reason: str) -> AnalysisError:
    return AnalysisError(
        f"the head cannot be split: {reason}; leave out head_pieces, or compute the loss with "
        "torch.nn.functional.cross_entropy right after the linear layer"
    )
