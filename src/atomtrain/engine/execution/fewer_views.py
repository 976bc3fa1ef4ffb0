"""Leaves out of a graph what gives a tensor that is there already.

Autograd's operations look at the same result several times in the same way, and look at what was
just looked at. Each such look costs the launching thread as much as a small operation. No number is
computed otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten
_RESHAPES = frozenset({aten.view.default, aten._unsafe_view.default})
_LOOKS = _RESHAPES | {
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
        if node.target not in _LOOKS or node.kwargs:
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
        if node.target in _LOOKS and not node.users:
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
