"""What the operations of a graph do to storages: who shares one, who writes to one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from atomtrain.analysis.export.functions import FunctionCall

_RANDOM = torch.Tag.nondeterministic_seeded
# Their schemas do not say that they write running statistics (arguments 3 and 4) when argument 5
# says so.
_STATISTICS = ("aten::batch_norm", "aten::instance_norm")


def tensors_of(node: fx.Node) -> list[Tensor]:
    """Return the (fake) tensors that a node results in."""
    value = node.meta.get("val")
    items = value if isinstance(value, tuple | list) else [value]
    return [item for item in items if isinstance(item, Tensor)]


def storages_of(node: fx.Node) -> frozenset[int]:
    """Return a key for each storage that a node's result lies in."""
    return frozenset(tensor.untyped_storage()._cdata for tensor in tensors_of(node))


def n_bytes_of(node: fx.Node) -> int:
    """Return the bytes of a node's result if it were stored densely."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(node))


def is_random(node: fx.Node) -> bool:
    """Return whether the operation may advance a random number generator."""
    target = node.target
    if isinstance(target, FunctionCall):
        return target.is_random
    if not isinstance(target, torch._ops.OpOverload):
        return False
    # Composite operations carry no tag: dropout, and attention with dropout.
    return _RANDOM in target.tags or "dropout" in target.name() or _has_dropout(node)


def _has_dropout(node: fx.Node) -> bool:
    return bool(argument(node, "dropout_p") or argument(node, "dropout"))


def argument(node: fx.Node, name: str) -> Any:
    """Return the argument of this name of an operation, `None` if it has none or it is not set."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    for position, described in enumerate(target._schema.arguments):
        if described.name == name:
            return node.args[position] if position < len(node.args) else node.kwargs.get(name)
    return None


def written_by(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose tensors the operation changes in place."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return []
    written: list[Any] = []
    for position, described in enumerate(target._schema.arguments):
        if described.alias_info is not None and described.alias_info.is_write:
            if position < len(node.args):
                written.append(node.args[position])
            else:
                written.append(node.kwargs.get(described.name))
    if target.name() in _STATISTICS and len(node.args) > 5 and node.args[5]:
        written += node.args[3:5]
    found: list[fx.Node] = []
    fx.node.map_arg(written, found.append)
    return found


def live_nodes(graph: fx.Graph, kept: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the calls that matter, in order: for the output, for `kept` buffers, for randomness.

    A call that only advances a random number generator matters: what follows draws other numbers
    without it.
    """
    storages = {key for node in kept for key in storages_of(node)}
    needed: set[fx.Node] = set()
    live = []
    for node in reversed(graph.nodes):
        if node.op == "output":
            needed.update(node.all_input_nodes)
        elif node.op == "call_function":
            writes = any(storages & storages_of(target) for target in written_by(node))
            if not (node in needed or writes or is_random(node)):
                continue
            live.append(node)
            needed.update(node.all_input_nodes)
        else:
            continue
        storages.update(key for source in node.all_input_nodes for key in storages_of(source))
    return live[::-1]
