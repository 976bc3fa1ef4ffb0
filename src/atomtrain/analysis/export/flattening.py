"""An exported graph as one flat graph: nested ones are put in place of their calls.

What is only checked is left out, and what cannot be trained swapped is refused with its line.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from atomtrain.analysis.export.conditions import MANUAL
from atomtrain.analysis.export.functions import Functions
from atomtrain.analysis.export.plain_trace import INNER
from atomtrain.errors import AnalysisError

_log = logging.getLogger("atomtrain.analysis")
_ASSERT = "_assert_scalar"
_CHECKS = _ASSERT, "sym_constrain_range", "sym_constrain_range_for_size"


class Flattener:
    """Copies a graph, with the bodies of nested graphs in place of their calls."""

    def __init__(self, root: nn.Module, functions: Functions) -> None:
        self.graph = fx.Graph()
        self.moved: dict[fx.Node, Any] = {}
        self._root, self._functions = root, functions
        self._left_out: dict[str, None] = {}
        """Places of checks."""

    def run(self, source: fx.Graph) -> fx.Graph:
        result = self._copy(source, self._root, self.moved, no_grad=False)
        if self._left_out:
            _log.warning(
                "forward checks its data, which swapped training leaves out, at %s",
                ", ".join(self._left_out),
            )
        self.graph.output(tuple(result))
        return self.graph

    def _copy(self, source: fx.Graph, root: Any, moved: dict[fx.Node, Any], no_grad: bool) -> Any:
        for node in source.nodes:
            if node.op == "placeholder":
                if node not in moved:
                    moved[node] = self.graph.node_copy(node, lambda n: moved[n])
            elif node.op == "get_attr":
                moved[node] = getattr(root, node.target)
            elif node.op == "output":
                return fx.node.map_arg(node.args[0], lambda n: moved[n])
            elif _is(node, "wrap_with_set_grad_enabled"):
                enabled, body, *rest = _resolved(node.args, moved)
                moved[node] = self._inline(body, rest, no_grad or not enabled)
            elif _is(node, "wrap_with_autocast"):
                _, _, enabled, _, body, *rest = _resolved(node.args, moved)
                if enabled:
                    raise AnalysisError(
                        f"forward uses autocast at {_place_in(body)}, which cannot be trained "
                        f"swapped; give the model the type itself (model.to(torch.bfloat16)), "
                        f"{MANUAL}"
                    )
                moved[node] = self._inline(body, rest, no_grad)
            elif isinstance(node.target, torch._ops.HigherOrderOperator):
                raise AnalysisError(
                    f"forward uses {node.target} at {place_of(node)}, which cannot be taken "
                    f"apart; remove it, {MANUAL}"
                )
            elif node.op == "call_function" and not isinstance(
                self._result_of_nested(node, moved), _Nothing
            ):
                moved[node] = self._result_of_nested(node, moved)
            elif _is_only_checked(node):
                if _is(node, _ASSERT):
                    self._left_out[_place_of_check(node)] = None
            elif not _is(node, "_assert_tensor_metadata"):
                _check_node(node)
                copied = self.graph.node_copy(node, lambda n: moved[n])
                copied.meta["no_grad"] = no_grad
                self._functions.place(copied)
                moved[node] = copied
        raise AnalysisError("the exported graph has no output")

    def _inline(self, body: fx.GraphModule, arguments: Sequence[Any], no_grad: bool) -> Any:
        inside = [node for node in body.graph.nodes if node.op == "placeholder"]
        moved = dict(zip(inside, arguments, strict=True))
        return self._copy(body.graph, body, moved, no_grad)

    def _result_of_nested(self, node: fx.Node, moved: Mapping[fx.Node, Any]) -> Any:
        """Return one result of an inlined graph if that is what the node takes."""
        if getattr(node.target, "__name__", "") == "getitem":
            whole = moved[node.args[0]]  # type: ignore[index]
            if isinstance(whole, tuple | list):
                return whole[node.args[1]]  # type: ignore[index]
        return _Nothing()


class _Nothing:
    pass


def _resolved(args: Any, moved: Mapping[fx.Node, Any]) -> list[Any]:
    return [moved[a] if isinstance(a, fx.Node) else a for a in args]


def _is(node: fx.Node, name: str) -> bool:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._overloadpacket.__name__ == name
    return isinstance(target, torch._ops.HigherOrderOperator) and target.name() == name


def _is_only_checked(node: fx.Node) -> bool:
    """Return whether a node is a number that depends on data and that only checks read, or a check.

    Such is the count of image tokens in the message of an error; no result comes from it. Before
    torch 2.13 what is made of such a number may be a plain one.
    """
    if any(_is(node, check) for check in _CHECKS):
        return True
    numbers = torch.SymInt | torch.SymFloat | torch.SymBool | int | float
    is_number = node.op == "call_function" and isinstance(node.meta.get("val"), numbers)
    return is_number and all(_is_only_checked(user) for user in node.users)


def _check_node(node: fx.Node) -> None:
    value = node.meta.get("val")
    sizes = [
        size
        for item in (value if isinstance(value, tuple | list) else [value])
        for size in (item.shape if isinstance(item, Tensor) else [item])
    ]
    if any(isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool) for size in sizes):
        raise AnalysisError(
            f"a shape or number depends on data at {place_of(node)}; write it with shapes that "
            f"do not change (masks, torch.where), {MANUAL}"
        )


def place_of(node: fx.Node) -> str:
    """Return the innermost source line of the user's that made a node: `file:line (statement)`."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line]
    for index in reversed(range(len(lines))):
        if lines[index].startswith('File "'):
            file, line = lines[index].split('"')[1], lines[index].split("line ")[1].split(",")[0]
            if file.startswith(INNER):
                continue
            code = lines[index + 1] if index + 1 < len(lines) else ""
            return f"{file}:{line} ({code})"
    return str(node.target)


def _place_of_check(node: fx.Node) -> str:
    """Return the line of a check; of what it checks, where torch 2.9 tells a line of its own."""
    place, inputs = place_of(node), node.all_input_nodes
    if inputs and (".py:" not in place or place.startswith("torch/")):
        return _place_of_check(inputs[0])
    return place


def _place_in(body: fx.GraphModule) -> str:
    inside = [node for node in body.graph.nodes if node.meta.get("stack_trace")]
    return place_of(inside[0]) if inside else "some place"
