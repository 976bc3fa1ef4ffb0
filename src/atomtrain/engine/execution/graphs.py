"""Graphs that wait from forward to backward, and where what autograd saved in them waits meanwhile.

Autograd's own hooks see every tensor that an operation saves for its backward, when it is saved and
when it is needed again:

- a view of the segment's slot is noted as its place there, and found again in whatever slot the
  segment lies in when backward comes;
- parameters in places of their own and buffers stay where they are; of a buffer that forward
  changes a copy is taken;
- anything else is kept, or goes to the host (`offload.py`), unless it is made again.

The segment's inputs enter through a node that has no data, so a graph holds no more than what is
saved, and its gradients leave as autograd made them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from atomtrain.analysis.costs.rematerialization import Rematerializer
from atomtrain.analysis.costs.storages import View, view_at, view_of
from atomtrain.analysis.layers.chain import Layer
from atomtrain.engine.execution.offload import Away, Offload, Parcel
from atomtrain.engine.execution.program_runs import Lesson, SegmentRun
from atomtrain.engine.execution.saved_script import Key, Performance, Script, key_of
from atomtrain.engine.state.gradients import Collector
from atomtrain.planning.plan.shape import Activation, Layers

T = TypeVar("T")
_ANCHOR = torch.empty(0, requires_grad=True)
"""Lets autograd take an entrance for the result of something."""


class _Entrance(torch.autograd.Function):
    """Lets a value into a graph; its gradient goes to a list."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, value: Tensor, found: list[Tensor]) -> Tensor:
        ctx.found = found
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.found.append(gradient)
        return None, None, None


def entrance(value: Tensor, found: list[Tensor]) -> Tensor:
    """Return a value as it enters a graph; backward adds its gradient to `found`.

    Autograd would copy the gradient of a leaf that is not dense, so that it gets other strides.
    """
    entered: Tensor = _Entrance.apply(_ANCHOR, value, found)  # type: ignore[no-untyped-call]
    return entered


class Weight(NamedTuple):
    """A parameter that enters a graph as a view, of which a gradient is there already."""

    key: int
    """The parameter's `id`."""
    leaf: Tensor
    view: Tensor


class Where(NamedTuple):
    """What of a device's memory stays in place between forward and backward, by storage."""

    slot: Tensor
    """The slot in which the segment is in forward."""
    staying: frozenset[int]
    changing: frozenset[int]
    """Buffers that forward writes to."""

    @property
    def slot_key(self) -> int:
        """The slot's storage."""
        key: int = self.slot.untyped_storage()._cdata
        return key


class WaitingGraph:
    """One micro-batch's graph of one segment, from its forward visit to its backward visit."""

    def __init__(
        self,
        where: Where,
        parcel: Parcel | None,
        scripts: dict[Key, Script],
        *,
        remakes: bool,
        compiled: bool = False,
        lesson: Lesson | None = None,
    ) -> None:
        """Make a graph of nothing yet.

        Args:
            where: What stays in place.
            parcel: Takes what is saved to the host; `None` keeps it.
            scripts: Of layers that have run; those of others are added.
            remakes: Whether what is cheap is made again, not sent.
            compiled: Whether layers are compiled.
            lesson: What is to be learnt of it.
        """
        self._compiled, self.lesson = compiled, lesson
        self._where, self.parcel, self._scripts = where, parcel, scripts
        self._remakes = remakes and parcel is not None
        self._slot = where.slot
        self._found: dict[str, list[Tensor]] = {}
        self._entrances: dict[str, GradientEdge] = {}
        self._edges: dict[str, GradientEdge] = {}
        self._weights: list[tuple[Callable[[], Tensor | None], GradientEdge]] = []

    def enter(self, weights: Iterable[Weight], collector: Collector) -> None:
        """Take note of weights that enter the graph as views; their gradients are collected."""
        self._weights = [
            (functools.partial(collector.take, key, leaf), get_gradient_edge(view))
            for key, leaf, view in weights
        ]

    def layer(
        self, number: int, layer: Layer, tensors: Mapping[str, Tensor], values: Sequence[Any]
    ) -> Sequence[Any]:
        """Run the chain's layer of a number, as `Layer.run` does."""
        if self.parcel is None:
            with self._hooks(functools.partial(self._pack, rematerializer=None)):
                written = layer.run(tensors, values)
        else:
            self.parcel.begin_layer()
            key = None if self._compiled else key_of(number, layer, values)
            script = None if key is None else self._scripts.get(key)
            if script is None:
                written = self._watched(key, layer.run, tensors, values)
            else:
                performance = Performance(script, self.parcel)
                with self._hooks(performance.pack):
                    written = layer.run(tensors, values)
                performance.end()
        if self.lesson is not None:
            self.lesson.note(layer, values, written)
        return written

    def _watched(self, key: Key | None, run: Callable[..., T], *given: Any) -> T:
        """Run a layer for the first time, or one that may do otherwise each time."""
        rematerializer = self._new_rematerializer() if self._remakes else None
        script = None if key is None else Script()

        def pack(tensor: Tensor) -> Any:
            packed = self._pack(tensor, rematerializer)
            if script is not None:
                changing = tensor.untyped_storage()._cdata in self._where.changing
                script.learn(tensor, packed, changing=changing)
            return packed

        with self._hooks(pack), rematerializer or nullcontext():
            result = run(*given)
        if key is not None and script is not None:
            script.learnt()
            self._scripts[key] = script
        return result

    def _hooks(self, pack: Callable[[Tensor], Any]) -> saved_tensors_hooks:
        return saved_tensors_hooks(pack, self._unpack)

    def run(
        self,
        taken: Mapping[str, Any],
        with_gradient: Callable[[str], bool],
        layers: Callable[[Mapping[str, Any]], dict[str, Any]],
        writes: Iterable[str],
    ) -> dict[str, Any]:
        """Run the segment forward with a graph; return what `layers` returns, without the graph.

        Args:
            taken: The segment's inputs.
            with_gradient: Whether the input of a name gets a gradient.
            layers: Runs the segment's layers on its inputs.
            writes: The values that later segments read.
        """
        with torch.enable_grad():
            inputs = dict(taken)
            for name, value in taken.items():
                if isinstance(value, Tensor) and with_gradient(name):
                    inputs[name] = entrance(value, self._found.setdefault(name, []))
                    self._entrances[name] = get_gradient_edge(inputs[name])
            values = layers(inputs)
            for name in writes:
                value = values[name]
                if isinstance(value, Tensor) and value.requires_grad and name not in inputs:
                    self._edges[name] = get_gradient_edge(value)
        return {n: v.detach() if isinstance(v, Tensor) else v for n, v in values.items()}

    def backward(
        self, slot: Tensor, begun: Callable[[str], bool], gradient_of: Callable[[str], Tensor]
    ) -> dict[str, Tensor]:
        """Run backward; return the gradients of the segment's inputs. The graph is used up.

        Args:
            slot: Where the segment's parameters are now.
            begun: Whether later segments gave the value of a name a gradient.
            gradient_of: Returns that gradient.
        """
        self._slot = slot
        # An input whose gradient later segments have begun is a root too: so autograd adds this
        # segment's contributions to it one by one, in the order in which it adds them when nothing
        # is swapped.
        roots = {**self._entrances, **self._edges}
        names = [name for name in roots if begun(name)]
        if names:
            edges = [roots[name] for name in names]
            seeds = [gradient_of(name) for name in names]
            for take, edge in self._weights:
                if (gradient := take()) is not None:
                    edges.append(edge)
                    seeds.append(gradient)
            torch.autograd.backward(edges, seeds)
        self._weights.clear()
        self._entrances.clear()
        self._edges.clear()
        if self.parcel is not None:
            self.parcel.close()
        return {name: found[0] for name, found in self._found.items() if found}

    def _new_rematerializer(self) -> Rematerializer:
        return Rematerializer(self._find)

    def _find(self, tensor: Tensor) -> Any:
        """Return what stands for a tensor that will be there in backward as it is now."""
        assert self.parcel is not None
        key = tensor.untyped_storage()._cdata
        if key == self._where.slot_key:
            return view_of(tensor)
        if key in self._where.changing:
            return None
        return tensor.data if key in self._where.staying else self.parcel.find(tensor)

    def _pack(self, tensor: Tensor, rematerializer: Rematerializer | None) -> Any:
        where, key = self._where, tensor.untyped_storage()._cdata
        if key == where.slot_key:
            return view_of(tensor)
        if key in where.changing:
            return tensor.detach().clone()
        # An alias without history: a graph must not hold its own outputs.
        if self.parcel is None or key in where.staying or tensor.device != where.slot.device:
            return tensor.data
        return self.parcel.pack(tensor, None if rematerializer is None else rematerializer.of)

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if isinstance(packed, Away):
            return packed.parcel.unpack(packed, self._unpack)
        place: View = packed
        return view_at(self._slot.untyped_storage(), place)


class Graphs:
    """The waiting graphs of a step."""

    def __init__(self, offload: Offload, *, remakes: bool, compiled: bool) -> None:
        """Hold none yet.

        Args:
            offload: Where what is saved may go.
            remakes: Whether what is cheap is made again, not sent.
            compiled: Whether layers are compiled.
        """
        self.offload, self._remakes, self._compiled = offload, remakes, compiled
        self._scripts: dict[Key, Script] = {}
        self._waiting: dict[tuple[Layers, int], WaitingGraph | SegmentRun] = {}

    def parcel(self, layers: Layers, activation: Activation) -> Parcel | None:
        """Return what takes the saved tensors of a graph of a segment; `None` keeps them."""
        start, stop = layers
        return self.offload.parcel(alone=stop - start == 1) if activation == "offload" else None

    def new(self, where: Where, parcel: Parcel | None, lesson: Lesson | None) -> WaitingGraph:
        """Return a graph of nothing yet; the rest is as of `WaitingGraph`."""
        return WaitingGraph(
            where,
            parcel,
            self._scripts,
            remakes=self._remakes,
            compiled=self._compiled,
            lesson=lesson,
        )

    def put(
        self, layers: tuple[int, int], micro_batch: int, graph: WaitingGraph | SegmentRun
    ) -> None:
        """Hold a graph until backward."""
        self._waiting[layers, micro_batch] = graph

    def take(self, layers: tuple[int, int], micro_batch: int) -> WaitingGraph | SegmentRun:
        """Hand a graph over to backward."""
        return self._waiting.pop((layers, micro_batch))

    def turn(self, downwards: Iterable[tuple[int, int]], micro_batches: int) -> None:
        """The turn is over: begin to bring back what is on the host, in the order in which backward
        wants it.

        Args:
            downwards: The segments whose graphs wait, in backward's order.
            micro_batches: How many there are of each.
        """
        graphs = [self._waiting[layers, i] for layers in downwards for i in range(micro_batches)]
        self.offload.turn([graph.parcel for graph in graphs if graph.parcel is not None])
