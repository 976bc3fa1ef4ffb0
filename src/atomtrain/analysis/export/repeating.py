"""Puts copies of what was traced once in place of the stand-ins of equal modules.

The result is the graph that tracing every module would have given, but for the names of nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from atomtrain.analysis.export.effects import tensors_of
from atomtrain.analysis.export.stand_ins import MARK, STAND_IN, UnequalError

_KEY = "L__self__"
"""How torch begins the keys of its stacks of module calls."""


class _Call(NamedTuple):
    """A call that was traced."""

    path: str
    given: tuple[fx.Node, ...]
    calls: list[fx.Node]
    """Its operations, in order."""


def repeat(graph: fx.Graph, sources: Mapping[str, fx.Node], paths: Sequence[str]) -> None:
    """Replace all stand-ins in the graph by copies of what they stand in for, in place.

    Args:
        graph: Flat, with marks and stand-ins.
        sources: The placeholder of each parameter and buffer, by its path in what was exported.
        paths: There, the path of the module of each call, by the call's number.

    Raises:
        UnequalError: what was traced uses more than its module's own tensors and what it was given.
    """
    traced: dict[int, _Call] = {}
    open_call: int | None = None
    for node in list(graph.nodes):
        if node.target is MARK:
            given, number = node.args
            if open_call is None:
                traced[number] = _Call(paths[number], tuple(given), [])
            open_call = None if open_call is not None else number
            graph.erase_node(node)
        elif node.target is STAND_IN:
            given, like, number, same_as = node.args
            call = traced[same_as]
            copies = _Copies(graph, sources, call, paths[number], given)
            copies.make(node)
            for user in list(node.users):
                user.replace_all_uses_with(copies.of(like[user.args[1]]))
                graph.erase_node(user)
            graph.erase_node(node)
        elif open_call is not None:
            traced[open_call].calls.append(node)


class _Copies:
    """Copies of the operations of a call, for another module and on other values."""

    def __init__(
        self,
        graph: fx.Graph,
        sources: Mapping[str, fx.Node],
        call: _Call,
        path: str,
        given: Sequence[fx.Node],
    ) -> None:
        self._graph, self._sources, self._call, self._path = graph, sources, call, path
        self._paths = {node: name for name, node in sources.items()}
        self._nodes: dict[fx.Node, fx.Node] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}
        for own, other in zip(call.given, given, strict=True):
            self._correspond(own, other)

    def make(self, before: fx.Node) -> None:
        """Copy all operations to where `before` is."""
        for node in self._call.calls:
            with self._graph.inserting_before(before):
                copied = self._graph.node_copy(node, self.of)
            copied.meta["val"] = fx.node.map_aggregate(node.meta.get("val"), self._value)
            copied.meta["nn_module_stack"] = self._stack(node)
            self._nodes[node] = copied

    def of(self, node: fx.Node) -> fx.Node:
        """Return what a node of the traced call is in this one."""
        if node not in self._nodes:
            name = self._paths.get(node, "")
            inside = name.removeprefix(f"{self._call.path}.")
            if inside == name or f"{self._path}.{inside}" not in self._sources:
                raise UnequalError(f"{self._call.path} uses {node.name}, which is not its own")
            self._correspond(node, self._sources[f"{self._path}.{inside}"])
        return self._nodes[node]

    def _correspond(self, own: fx.Node, other: fx.Node) -> None:
        self._nodes[own] = other
        for one, two in zip(tensors_of(own), tensors_of(other), strict=True):
            storage = two.untyped_storage()
            key = one.untyped_storage()._cdata
            if self._storages.setdefault(key, storage)._cdata != storage._cdata:
                raise UnequalError(f"{own.name} and {other.name} share memory with different ones")

    def _value(self, value: Any) -> Any:
        """Return a tensor that lies in its storage as the given one does in its own."""
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage()
        own = self._storages.get(storage._cdata)
        if own is None:
            own = torch.UntypedStorage(storage.nbytes(), device="meta")
            self._storages[storage._cdata] = own
        empty = torch.empty(0, dtype=value.dtype, device="meta")
        return empty.set_(own, value.storage_offset(), value.shape, value.stride())

    def _stack(self, node: fx.Node) -> dict[str, tuple[str, Any]]:
        """Return the module calls around an operation, with the other module's path."""
        before = self._call.path
        stack = {}
        for key, (path, kind) in (node.meta.get("nn_module_stack") or {}).items():
            if path != before and not path.startswith(f"{before}."):
                stack[key] = (path, kind)
                continue
            if not key.startswith(_KEY + before):
                raise UnequalError(f"calls are not named as expected: {key}")
            own = _KEY + self._path + key.removeprefix(_KEY + before)
            stack[own] = (self._path + path.removeprefix(before), kind)
        return stack
