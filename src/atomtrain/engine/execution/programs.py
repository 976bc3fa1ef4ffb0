"""An offloaded layer's forward and backward as two lists of operations, found out once.

Autograd makes the same graph for each micro-batch, asks about each tensor that it saves, and asks
for it again. Of a layer that is a fixed list of operations (`GraphLayer`) all that is known
beforehand: its graph is traced once on tensors without data, and divided. Forward then is a
function that does the operations and sends what backward needs; backward is one that takes it back,
makes again what is cheap, does what autograd did, in its order, and adds each gradient to its place
as soon as it is there. No graph waits, nothing is looked up. The operations are autograd's own, so
the bits are too.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils._python_dispatch import _disable_current_modes

from atomtrain.analysis.costs.rematerialization import CHEAP, DEEPEST
from atomtrain.analysis.export.conditions import ways_to_trace
from atomtrain.analysis.layers.direct_calls import direct, function_of
from atomtrain.engine.execution.kept_whole import kept_whole
from atomtrain.engine.execution.shorter_graphs import (
    join_slices,
    leave_out_views,
    take_looks_out,
)

aten = torch.ops.aten
_SAME = frozenset({aten.detach.default, aten.alias.default})
"""Operations that autograd needs, and nobody without a graph."""
_VIEWS = frozenset({aten._unsafe_view.default, *_SAME})
"""Of the operations whose results lie in their argument's memory those whose schema hides it."""
_WITHOUT_GRAPH: dict[Any, Callable[..., Any]] = {
    aten._unsafe_view.default: Tensor.view,
    aten.mul.Scalar: torch.mul,
    aten.div.Scalar: torch.div,
    aten.add_.Scalar: Tensor.add_,
}
_OTHER_FORMULAS = frozenset({aten.prod.default, aten.prod.dim_int})
"""Operations whose gradient autograd finds by another formula, with other bits, where tensors have
no data."""
_NEEDS_GRAPH = frozenset({aten.mkldnn_rnn_layer.default})
"""Operations that return less than backward needs where no graph is made."""
_TRACING = threading.Lock()
"""Held while a layer is traced, which switches flags of the whole process."""
Given = Callable[[Sequence[Any]], Sequence[Any]]
Operation = Callable[..., Any]
Instead = Callable[[Operation], Operation]
"""Returns what is done in place of an operation, such as one that takes its time."""
_AGAIN = "again"
"""Marks, in a node's `meta`, what backward makes again."""


class Like(NamedTuple):
    """What a tensor is like, but for its data."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


def like(tensor: Tensor, *, requires_grad: bool) -> Like:
    """Return what a tensor is like."""
    return Like(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, requires_grad)


class LayerProgram(NamedTuple):
    """What a kind of layer does."""

    looks: Callable[..., Sequence[Any]]
    """`looks(*stays)` returns `looked`: parameters and buffers, and what is looked at in them."""
    forward: Callable[..., Sequence[Any]]
    """`forward(run, *looked, *reads)` returns what is written."""
    again: Callable[..., Sequence[Any]]
    """`again(run, *looked, *reads)` sends what `forward` does, and does nothing more."""
    backward: Callable[..., Sequence[Any]]
    """`backward(run, *looked)` returns the gradients of what is read, in order."""
    sent: tuple[int, ...]
    """What is sent; backward takes the last one first."""
    reads: int
    """The numbers below are of what is read, where several may lie in one storage."""


def program_of(
    run: Given, stays: Sequence[Like], reads: Sequence[Like], gradient: Like, root: int,
    *, remakes: bool, again: Instead | None = None,
) -> LayerProgram | None:  # fmt: skip
    """Return what a layer does, or `None` if it cannot be divided.

    Args:
        run: Does it, given parameters, buffers and what it reads; returns what it writes.
        stays: Parameters and buffers, which are there in backward too.
        reads: What it reads.
        gradient: Of the one of its results that has a gradient.
        root: Which one that is.
        remakes: Whether what is cheap is made again, not sent.
        again: Stands in for each operation that backward makes again; `None`: itself.
    """
    if ways_to_trace(gradient.device)[0].device != gradient.device:
        return None
    with _TRACING, _disable_current_modes():
        traced = _Traced(run, stays, reads, gradient, root)
        division = _Division(traced, remakes=remakes)
        return division.program(again) if traced.divisible else None


class _Traced:
    """A layer's forward and backward as one graph."""

    def __init__(
        self, run: Given, stays: Sequence[Like], reads: Sequence[Like], gradient: Like, root: int
    ) -> None:
        without_data = FakeTensorMode()
        with without_data:
            given = [_empty(one) for one in (*stays, *reads)]
            seed = _empty(gradient)
        names = set[str]()
        written = 0

        def both(given: list[Tensor], seed: Tensor) -> list[Any]:
            nonlocal written
            with torch.enable_grad():
                results = list(run(given))
            written = len(results)
            mode = get_proxy_mode()
            assert mode is not None
            names.update(node.name for node in mode.tracer.graph.nodes)
            wanted = [one for one in given if one.requires_grad]
            return results + list(
                torch.autograd.grad([results[root]], wanted, [seed], allow_unused=True)
            )

        with without_data, kept_whole(gradient.device):  # also for what is made of nothing
            graph: fx.Graph = make_fx(both)(given, seed).graph
        nodes = list(graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        self.stays, self.reads = inputs[: len(stays)], inputs[len(stays) : -1]
        self.seed = inputs[-1]
        calls = [node for node in nodes if node.op == "call_function"]
        self.forward = [node for node in calls if node.name in names]
        self.backward = [node for node in calls if node.name not in names]
        results = list(nodes[-1].args[0])
        self.written = results[:written]
        wanted = [n for n, one in zip(inputs, given, strict=False) if one.requires_grad]
        self.gradients = dict(zip(wanted, results[written:], strict=True))
        self.divisible = len(calls) + len(inputs) + 1 == len(nodes) and not any(
            _changes(node) for node in calls
        )
        self.divisible &= not any(_draws(node) for node in self.backward)
        undivided = _OTHER_FORMULAS | _NEEDS_GRAPH
        self.divisible &= not any(node.target in undivided for node in self.forward)


def _empty(one: Like) -> Tensor:
    return torch.empty_strided(
        one.size, one.stride, dtype=one.dtype, device=one.device, requires_grad=one.requires_grad
    )


def _changes(call: fx.Node) -> bool:
    """Return whether an operation writes to its arguments, or may do."""
    target: Any = call.target
    if target is operator.getitem:
        return False
    return not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable


def _draws(call: fx.Node) -> bool:
    """Return whether an operation may draw random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(call.target, "tags", ())


def _is_view(node: fx.Node) -> bool:
    """Return whether what an operation returns lies in the memory of its first argument."""
    target: Any = node.target
    if target is operator.getitem:
        return _is_view(_first(node))
    return target in _VIEWS or any(one.alias_info is not None for one in target._schema.returns)


def _first(node: fx.Node) -> fx.Node:
    first = node.args[0]
    assert isinstance(first, fx.Node)
    return first


def _base(node: fx.Node) -> fx.Node:
    """Return the node in whose memory the result of a node lies."""
    while node.op == "call_function" and _is_view(node):
        node = _first(node)
    return node


def _maker(base: fx.Node) -> fx.Node:
    """Return the operation that makes a result: of several its `getitem` tells which."""
    return _first(base) if base.target is operator.getitem else base


def _fast(graph: fx.Graph, again: Instead | None = None) -> Operation:
    """Return a graph as a function; where no graph is made others do the same in less time."""
    for node in graph.nodes:
        if node.target is aten.slice.Tensor and len(node.args) == 4 and not node.kwargs:
            of, dim, start, _ = node.args
            length = node.meta["val"].shape[dim]
            if length and start is not None and start >= 0:  # an empty one may start anywhere
                node.target, node.args = torch.narrow, (of, dim, start, length)
        node.target = _WITHOUT_GRAPH.get(node.target, node.target)
        if again is not None and node.meta.get(_AGAIN):
            node.target = again(direct(node.target, len(node.args)))
    return function_of(graph)


class _Division:
    """What of a traced layer forward does, what backward, and what waits in between."""

    def __init__(self, traced: _Traced, *, remakes: bool) -> None:
        self._traced = traced
        self._stays = set(traced.stays)
        self._inside = set(traced.backward)
        self._needed = {
            _base(node)
            for call in traced.backward
            for node in call.all_input_nodes
            if node not in self._inside and node is not traced.seed
        } - self._stays
        self._depths: dict[fx.Node, int] = {}
        """How many cheap operations lead to what can be made again."""
        for call in traced.forward if remakes else ():
            self._note(call)
        sent = [node for node in traced.reads if node in self._needed]
        self._reads = len(sent)
        sent += [
            node for node in traced.forward
            if node in self._needed and _maker(node) not in self._depths
        ]  # fmt: skip
        self._sent = {node: number for number, node in enumerate(sent)}

    def program(self, again: Instead | None) -> LayerProgram:
        """Return the two functions; `again` is as of `program_of`."""
        forward, only_sent = self._forward(), self._forward(writes=False)
        backward, taken = self._backward()
        looks = take_looks_out([forward, only_sent, backward], len(self._traced.stays))
        return LayerProgram(
            looks,
            _fast(forward),
            _fast(only_sent),
            _fast(backward, again),
            tuple(reversed(taken)),
            self._reads,
        )

    def _note(self, call: fx.Node) -> None:
        if call.target not in CHEAP:
            return
        depth = 1
        for node in call.all_input_nodes:
            base = _base(node)
            before = self._depths.get(_maker(base))
            if before is not None:
                depth = max(depth, before + 1)
            elif base not in self._stays and base not in self._needed:
                return
        if depth <= DEEPEST:
            self._depths[call] = depth

    def _forward(self, *, writes: bool = True) -> fx.Graph:
        traced = self._traced
        written = traced.written if writes else ()
        wanted = {node for node in written if isinstance(node, fx.Node)} | set(self._sent)
        for node in reversed(traced.forward):
            if node in wanted or _draws(node):
                wanted.add(node)
                wanted.update(node.all_input_nodes)
        graph = fx.Graph()
        run = graph.placeholder("run")
        env: dict[fx.Node, fx.Node] = {}
        for node in (*traced.stays, *traced.reads):
            env[node] = graph.placeholder(node.name)
        for node in (*traced.reads, *traced.forward):
            if node.op == "call_function":
                if node not in wanted:
                    continue
                env[node] = graph.node_copy(node, env.__getitem__)
            if node in self._sent:
                graph.call_method("send", (run, self._sent[node], env[node]))
        graph.output(fx.node.map_arg(tuple(written), env.__getitem__))
        leave_out_views(graph)
        return graph

    def _backward(self) -> tuple[fx.Graph, list[int]]:
        traced = self._traced
        graph = fx.Graph()
        run = graph.placeholder("run")
        env = {node: graph.placeholder(node.name) for node in traced.stays}
        env[traced.seed] = graph.call_method("gradient", (run,))
        numbers = {node: number for number, node in enumerate(traced.stays)}
        adds: dict[fx.Node, list[int]] = {}
        for node, gradient in traced.gradients.items():
            if node in numbers and isinstance(gradient, fx.Node):
                adds.setdefault(gradient, []).append(numbers[node])
        taken: dict[fx.Node, int] = {}

        def there(node: fx.Node, once: dict[fx.Node, fx.Node]) -> fx.Node:
            """Return what forward made, as backward has it; `once` is for this operation alone."""
            found = env.get(node) or once.get(node)
            if found is not None:
                return found
            base = _base(node)
            lasts = base in self._needed or base in self._stays
            if node.target in _SAME:
                found = there(_first(node), once)
            elif node in self._sent:
                found = graph.call_method("take", (run, self._sent[node]))
                found.meta = node.meta
                taken[found] = self._sent[node]
            elif node is not base or node is _maker(node):
                found = graph.node_copy(node, lambda n: there(n, once))
                found.meta[_AGAIN] = True
            else:
                # All results that are needed are taken of it at once.
                maker = graph.node_copy(_maker(node), lambda n: there(n, once))
                maker.meta[_AGAIN] = True
                for user in _maker(node).users:
                    if user in self._needed and user not in env:
                        env[user] = graph.node_copy(user, lambda _: maker)
                found = env.get(node) or graph.node_copy(node, lambda _: maker)
            (env if lasts else once)[node] = found
            return found

        for gradient, of in adds.items():
            if gradient not in self._inside:
                for number in of:
                    graph.call_method("add", (run, number, there(gradient, {})))
        for call in traced.backward:
            once: dict[fx.Node, fx.Node] = {}
            given = [n for n in call.all_input_nodes if n not in self._inside]
            for node in given:
                there(node, once)
            env[call] = self._copied(graph, call, {**env, **once})
            for number in adds.get(call, ()):
                graph.call_method("add", (run, number, env[call]))
        found = [traced.gradients.get(node) for node in traced.reads]
        graph.output(tuple(None if node is None else there(node, {}) for node in found))
        for node in reversed(list(graph.nodes)):
            if node.target is aten.t.default and not node.users:
                graph.erase_node(node)
        leave_out_views(graph)
        join_slices(graph)
        self._let_go(graph, run, taken)
        return graph, list(taken.values())

    def _copied(self, graph: fx.Graph, call: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
        """Copy an operation, unless it changes nothing."""
        first = env[call.all_input_nodes[0]] if call.all_input_nodes else None
        if call.target in _SAME and first is not None:
            return first
        turned = aten.t.default
        if call.target is turned and first is not None and first.target is turned:
            return _first(first)
        return graph.node_copy(call, env.__getitem__)

    def _let_go(self, graph: fx.Graph, run: fx.Node, taken: dict[fx.Node, int]) -> None:
        """Say after its last use that what was taken is done with."""
        nodes = list(graph.nodes)
        owner: dict[fx.Node, fx.Node] = {node: node for node in taken}
        last: dict[fx.Node, fx.Node] = {}
        for node in nodes:
            for one in node.all_input_nodes:
                if one in owner:
                    last[owner[one]] = node
            if node.op == "call_function":
                first = node.args[0] if node.args else None
                if _is_view(node) and isinstance(first, fx.Node) and first in owner:
                    owner[node] = owner[first]
        for node, user in last.items():
            if user.op == "output":
                continue
            with graph.inserting_after(user):
                graph.call_method("done", (run, taken[node]))
