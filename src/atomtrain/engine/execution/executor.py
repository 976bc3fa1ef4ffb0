"""Runs a plan: the vertical schedule over all segments and micro-batches of a step.

The only executor; devices differ, it does not. It runs on the caller's thread, which is the
compute stream.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from atomtrain.analysis.costs.costs import ChainCosts
from atomtrain.analysis.layers.chain import Chain
from atomtrain.engine.devices.device import Device
from atomtrain.engine.devices.host_memory import HostPool
from atomtrain.engine.devices.streams import Record, recorded_on_host, recorded_visit
from atomtrain.engine.execution.boundary_activations import (
    ActivationPrefetch,
    BoundaryActivations,
    Links,
    Outbox,
    Pass,
    Route,
    Saved,
)
from atomtrain.engine.execution.compiled import CompiledLayer
from atomtrain.engine.execution.graphs import Graphs, WaitingGraph, Weight, Where, entrance
from atomtrain.engine.execution.host_layers import HostLayers
from atomtrain.engine.execution.offload import Offload
from atomtrain.engine.execution.program_runs import (
    ChainPrograms,
    Known,
    SegmentRun,
    looked_at,
)
from atomtrain.engine.execution.randomness import Randomness
from atomtrain.engine.execution.slots import Slots, Tensors
from atomtrain.engine.state.residents import DeviceBuffers
from atomtrain.engine.state.store import HostStore
from atomtrain.engine.updates.shares import Delivery
from atomtrain.planning.cost.segments import SavedTensors
from atomtrain.planning.cost.timeline import label_of, label_of_layers
from atomtrain.planning.plan.plan import Plan
from atomtrain.planning.plan.shape import Layers, Phase, Visit, evaluation_visits, training_visits

Values = Mapping[str, Any]
"""A micro-batch: the chain's inputs by name."""


class Executor:
    """Executes training steps and evaluations of one chain under one plan."""

    def __init__(
        self,
        chain: Chain,
        costs: ChainCosts,
        plan: Plan,
        store: HostStore,
        device: Device,
        updates: Delivery,
    ) -> None:
        """Allocate slots and buffers; call inside `Device.computing`."""
        self._chain, self._costs, self._plan = chain, costs, plan
        self._device, self._updates = device, updates
        self.slots = Slots(chain, plan, store, device, updates)
        self.buffers = DeviceBuffers(chain, costs, device, plan.host_layers)
        self.pool, self._outbox = HostPool(device), Outbox(device)
        self._host = HostLayers(chain, plan.host_layers, store, updates, self.pool)
        self._values = BoundaryActivations(device, self.pool, self._outbox)
        self._gradients = BoundaryActivations(device, self.pool, self._outbox)
        self._prefetch = ActivationPrefetch(self._values, self._gradients)
        starts = {low for low, _ in itertools.pairwise(plan.backward_bounds)}
        random = any(layer.random for layer in costs.layers)
        self._random = Randomness(device.generator, random, starts)
        self._staying = self.slots.storages | self.buffers.storages
        self._training = Pass(chain, training_visits(plan.shape), plan)
        self._evaluation = Pass(chain, evaluation_visits(plan.shape), plan)
        planned = costs if plan.remakes else costs.sending_all()
        window_bytes = SavedTensors(chain, planned).window_bytes
        # Compiled layers would run operation by operation if these were watched.
        compiled = any(isinstance(layer, CompiledLayer) for layer in chain.layers)
        self._compiled = compiled
        remakes = plan.remakes and not compiled
        self._graphs = Graphs(
            Offload(device, self.pool, window_bytes), remakes=remakes, compiled=compiled
        )
        able = not compiled and not device.one_memory
        self._programs = ChainPrograms(chain, costs, remakes=remakes) if able else None
        self._stays: dict[tuple[Layers, int], list[list[Tensor]]] = {}
        self._looks: dict[tuple[Layers, int, int], list[Sequence[Tensor]]] = {}
        self._where: dict[tuple[Layers, int], Where] = {}
        self._links = Links(chain)
        self._shared: dict[Layers, frozenset[int]] = {}
        self._losses: list[Tensor] = []
        self._count = self._of = 0
        self._weights: Sequence[float] | None = None
        self.record: Record | None = None
        """Where visits are noted, or `None`."""
        self.visited: Callable[[Visit], None] | None = None
        """Called after each visit, on the computing thread."""

    @property
    def random(self) -> bool:
        """Whether any layer draws random numbers."""
        return self._random.used

    def train(
        self, micro_batches: Sequence[Values], weights: Sequence[float] | None = None
    ) -> list[Tensor]:
        """Run forward and backward; gradients go to `Updates`. Return the losses (0-d).

        Args:
            micro_batches: At least one.
            weights: What each one's loss is multiplied by before its backward; `None`: it is
                divided by their number.
        """
        self.begin(len(micro_batches), len(micro_batches), weights)
        return self.run(micro_batches)

    def begin(
        self,
        count: int,
        of: int,
        weights: Sequence[float] | None,
        seeds: Sequence[int] | None = None,
    ) -> None:
        """Start a step of which `count` of `of` micro-batches run here, with these `weights`, and
        with `seeds` if some do not."""
        self._of, self._weights = of, weights
        self._random.begin(count, seeds)
        backward = [v.layers for v in self._training.visits if v.gradient is not None]
        deliveries: dict[Layers, list[int]] = {v: self.slots.delivered(v) for v in backward}
        if self._plan.host_layers:
            deliveries[self._host.layers] = self._host.blocks
        self._updates.begin_step(deliveries)

    def run(self, micro_batches: Sequence[Values]) -> list[Tensor]:
        """Run the step that has begun; return the losses (0-d)."""
        with torch.no_grad():  # what makes a graph says so
            losses = self._run(self._training, micro_batches)
        self.slots.there.finish_step()
        self._updates.finish_step()
        self._random.finish()
        return losses

    def evaluate(self, micro_batches: Sequence[Values]) -> list[Tensor]:
        """Run forward only. Return the losses (0-d)."""
        with torch.no_grad():
            return self._run(self._evaluation, micro_batches)

    def refresh_buffers(self) -> None:
        """Bring the model's buffers to the device again."""
        self.buffers.from_host()

    def _run(self, a_pass: Pass, micro_batches: Sequence[Values]) -> list[Tensor]:
        if self._programs is not None:
            self._programs.begin()
        self.buffers.notice()
        self._losses, self._count = [], len(micro_batches)
        for index, micro_batch in enumerate(micro_batches):
            for name in self._chain.inputs:
                self._values.put_input(index, name, micro_batch[name])
        training = a_pass is self._training
        if self._plan.host_layers:
            self._run_host_layers(micro_batches, training)
        self.slots.begin(a_pass.visits)
        for index, visit in enumerate(a_pass.visits):
            if visit.phase is Phase.TURN:
                self._outbox.drain()  # backward counts on the memory
                self._graphs.offload.drain()
            if self.record is not None:
                self.record.label = label_of(visit)
            tensors = self.slots.enter(index)
            now, following = a_pass.wanted[index : index + 2]
            self._prefetch.begin(now, following, self._count)
            with recorded_visit(self.record):
                self._visit(visit, a_pass.routes.get(index), tensors)
                self.slots.update(index)
            if training and visit.phase is Phase.TURN:
                self._graphs.turn(self._training.found, self._count)
            del tensors
            self.slots.leave(index)
            if self.visited is not None:
                self.visited(visit)
        if self._plan.host_layers and training:
            if self.record is not None:
                self.record.label = label_of_layers(Phase.BACKWARD, self._host.layers)
            self._host.backward([self._gradients_for_host(i) for i in range(self._count)])
        self._values.clear()
        self._gradients.clear()
        losses, self._losses = self._losses, []
        return losses

    def _run_host_layers(self, micro_batches: Sequence[Values], training: bool) -> None:
        # The host writes into buffers of the pool at once, in no stream's order: whatever fetched
        # from them in an evaluation just before must be through.
        self._device.synchronize()
        with self._device.on_host(), recorded_on_host(self.record, self._host.layers):
            results = self._host.forward(micro_batches, training)
        for index, result in enumerate(results):
            for name, (value, buffer) in result.items():
                self._values.put_host(index, name, value, buffer)

    def _gradients_for_host(self, micro_batch: int) -> dict[str, Saved]:
        found = {n: self._gradients.hand_over(micro_batch, n) for n in self._host.writes}
        return {name: saved for name, saved in found.items() if saved is not None}

    def _visit(self, visit: Visit, route: Route | None, tensors: Tensors) -> None:
        start, stop = visit.layers
        reads, writes = self._chain.reads(start, stop), self._chain.writes(start, stop)
        for micro_batch in range(self._count):
            taken = self._prefetch.take(micro_batch)
            if route is not None:
                self._forward(visit, route, tensors, micro_batch, taken)
                self._values.forget(micro_batch, route.last_read)
            elif visit.finds:
                self._backward_found(visit, micro_batch)
            elif self._has_programs(visit, taken):
                self._forward_for_backward(visit, tensors, micro_batch, taken, writes)
                taken.clear()
                self._backward_found(visit, micro_batch)
            else:
                graph = self._graph(visit, tensors, micro_batch, taken)
                self._backward(visit, micro_batch, graph, writes)
                del graph
            del taken
            self._values.drop(micro_batch, reads)
            if route is None:
                self._values.forget(micro_batch, writes)
                self._gradients.forget(micro_batch, writes)

    def _forward(
        self,
        visit: Visit,
        route: Route,
        tensors: Tensors,
        micro_batch: int,
        taken: dict[str, Any],
    ) -> None:
        if visit.leaves:
            values = self._forward_for_backward(visit, tensors, micro_batch, taken, route.outputs)
        elif visit.phase is Phase.EVALUATE or self._compiled:
            values = self._run_layers(visit, tensors, micro_batch, taken, route.outputs)
        else:
            values = self._forward_to_forget(visit, tensors, micro_batch, taken, route.outputs)
        taken.clear()
        for name in route.outputs:
            value = values.pop(name)
            if name == self._chain.loss:
                self._losses.append(value.detach())
            else:
                keep, save = name in route.keep, name in route.save
                self._values.put(micro_batch, name, value, keep=keep, save=save)

    def _forward_to_forget(
        self,
        visit: Visit,
        tensors: Tensors,
        micro_batch: int,
        taken: Mapping[str, Any],
        outputs: Sequence[str],
    ) -> dict[str, Any]:
        """Run the segment forward, which is recomputed for backward, as if it had a graph.

        Some operations choose another kernel where nothing has a gradient, with other bits: matrix
        products of what is not contiguous, attention on GPUs. Programs have made that choice.
        """
        _, known = self._known(visit, taken)
        if known is not None:
            looked = self._looked(visit, visit.slot, known)
            run = SegmentRun(known, looked, None, self.slots.collector, forgets=True)
            return self._run_layers(visit, tensors, micro_batch, taken, outputs, run)
        inputs = dict(taken)
        with torch.enable_grad(), saved_tensors_hooks(_forget, _forget):
            for name, value in taken.items():
                if isinstance(value, Tensor) and self._costs.values[name].requires_grad:
                    inputs[name] = entrance(value, [])
            return self._run_layers(visit, tensors, micro_batch, inputs, outputs)

    def _forward_for_backward(
        self,
        visit: Visit,
        tensors: Tensors,
        micro_batch: int,
        taken: Mapping[str, Any],
        outputs: Sequence[str],
    ) -> dict[str, Any]:
        """Run the segment forward with a graph that waits for backward, or by programs without."""
        graph = self._graph_that_waits(visit, taken)
        if isinstance(graph, WaitingGraph):
            with torch.enable_grad():
                tensors, weights = self._entering(visit, tensors)
            graph.enter(weights, self.slots.collector)
        values = graph.run(
            taken,
            lambda name: self._costs.values[name].requires_grad,
            lambda inputs: self._run_layers(visit, tensors, micro_batch, inputs, outputs, graph),
            self._chain.writes(*visit.layers),
        )
        self._graphs.put(visit.layers, micro_batch, graph)
        return values

    def _has_programs(self, visit: Visit, taken: Mapping[str, Any]) -> bool:
        """Return whether a segment that is recomputed runs without a graph, or may learn to."""
        if self._programs is None or visit.phase is not Phase.BACKWARD:
            return False
        return self._programs.has(self._programs.key_of(visit.layers, taken))

    def _known(self, visit: Visit, taken: Mapping[str, Any]) -> tuple[Any, list[Known] | None]:
        """Return under what a segment's programs on such values are known, and those that are."""
        if self._programs is None:
            return None, None
        key = self._programs.key_of(visit.layers, taken)
        return key, self._programs.find(key)

    def _graph_that_waits(
        self, visit: Visit, taken: Mapping[str, Any]
    ) -> WaitingGraph | SegmentRun:
        parcel = self._graphs.parcel(visit.layers, visit.activation)
        key, known = self._known(visit, taken)
        if known is not None:
            looked = self._looked(visit, visit.home, known)
            again = visit.phase is Phase.BACKWARD
            return SegmentRun(known, looked, parcel, self.slots.collector, again=again)
        where = self._where.get((visit.layers, visit.slot))
        if where is None:
            where = self._where[visit.layers, visit.slot] = Where(
                self.slots.slot_of(visit), self._staying, self.buffers.changing(*visit.layers)
            )
        lesson = None if self._programs is None else self._programs.lesson(key)
        return self._graphs.new(where, parcel, lesson)

    def _backward_found(self, visit: Visit, micro_batch: int) -> None:
        """Run backward of a segment whose graph waited."""

        def begun(name: str) -> bool:
            return (micro_batch, name) in self._gradients

        def gradient_of(name: str) -> Tensor:
            gradient: Tensor = self._gradients.take(micro_batch, name)
            return gradient

        graph = self._graphs.take(visit.layers, micro_batch)
        if isinstance(graph, SegmentRun):
            looked = self._looked(visit, visit.slot, graph.known)
            gradients = graph.backward(looked, begun, gradient_of)
        else:
            gradients = graph.backward(self.slots.slot_of(visit), begun, gradient_of)
            if graph.lesson is not None and self._programs is not None:
                stays, kept = self._stays_in(visit, visit.home), graph.parcel is None
                self._programs.learn(graph.lesson, stays, gradients, kept=kept)
        for name in list(gradients):
            self._put_gradient(micro_batch, name, gradients.pop(name))

    def _stays_in(self, visit: Visit, slot: int) -> list[list[Tensor]]:
        """Return the parameters and buffers of a segment where it lies in a slot, by layer."""
        stays = self._stays.get((visit.layers, slot))
        if stays is None:
            assert self._programs is not None
            stays = []
            tensors = self.slots.tensors_in(visit.layers, slot)
            for index, own in zip(range(*visit.layers), tensors, strict=True):
                found = {**own, **self.buffers.of(index, 0, visit.phase, once=True)}
                stays.append([found[name] for name in self._programs.names(index)])
            self._stays[visit.layers, slot] = stays
        return stays

    def _looked(
        self, visit: Visit, slot: int, known: Sequence[Known]
    ) -> Sequence[Sequence[Tensor]]:
        """Return what `_stays_in` does, and what programs look at in it."""
        key = visit.layers, slot, id(known)  # which are known for good
        if key not in self._looks:
            self._looks[key] = looked_at(known, self._stays_in(visit, slot))
        return self._looks[key]

    def _graph(
        self, visit: Visit, tensors: Tensors, micro_batch: int, taken: dict[str, Any]
    ) -> _Graph:
        """Run the segment forward with a graph."""
        inputs, found = dict(taken), dict[str, list[Tensor]]()
        taken.clear()
        with torch.enable_grad():
            for name, value in inputs.items():
                if isinstance(value, Tensor) and self._costs.values[name].requires_grad:
                    inputs[name] = entrance(value, found.setdefault(name, []))
            del value
            writes = self._chain.writes(*visit.layers)
            tensors, weights = self._entering(visit, tensors)
            values = self._run_layers(visit, tensors, micro_batch, inputs, writes)
        # A value that later segments read too has a gradient when this segment runs backward, which
        # starts from it, too: so autograd adds this segment's contributions to it one by one, in
        # the order in which it adds them when nothing is swapped.
        entrances = {name: inputs[name] for name in found}
        return _Graph(found, entrances, {name: values[name] for name in writes}, weights)

    def _entering(self, visit: Visit, tensors: Tensors) -> tuple[Tensors, list[Weight]]:
        """Let weights that several layers of a segment use, and later segments too, enter as views.

        Backward starts from them, too, with what later segments have added to their gradients: so
        autograd goes on adding one by one, as where nothing is swapped. With several micro-batches
        no order of additions is that.
        """
        shared = self._shared.get(visit.layers)
        if shared is None:
            shared = self._shared[visit.layers] = _shared_again(self._chain, visit.layers)
        if not shared or self._of > 1:
            return tensors, []
        entered: dict[int, Weight] = {}
        given = []
        layers = self._chain.layers[slice(*visit.layers)]
        for layer, own in zip(layers, tensors, strict=True):
            views = {}
            for name, parameter in layer.parameters.items():
                if (key := id(parameter)) in shared:
                    if key not in entered:
                        entered[key] = Weight(key, own[name], own[name].view_as(own[name]))
                    views[name] = entered[key].view
            given.append({**own, **views})
        return given, list(entered.values())

    def _backward(
        self, visit: Visit, micro_batch: int, graph: _Graph, writes: Sequence[str]
    ) -> None:
        begun = dict(graph.entrances)
        begun.update({name: graph.values[name] for name in writes})
        roots, seeds = [], list[Tensor | None]()
        if visit.phase is Phase.TURN:
            loss = graph.values[self._chain.loss]
            self._losses.append(loss.detach())
            with torch.enable_grad():
                weights = self._weights
                part = loss / self._of if weights is None else loss * weights[micro_batch]
                # Asked for as late as possible: the step before may still be deciding.
                scale = self._updates.scale_of_loss()
                # In place, for the plan counts no number more.
                roots.append(part if scale == 1.0 else part.mul_(scale))
            seeds.append(None)
            del loss
        for name, root in begun.items():
            if (micro_batch, name) in self._gradients:
                roots.append(root)
                seeds.append(self._gradients.take(micro_batch, name))
                del root
        for weight in graph.weights:
            if (gradient := self.slots.collector.take(weight.key, weight.leaf)) is not None:
                roots.append(weight.view)
                seeds.append(gradient)
        graph.weights.clear()
        begun.clear()
        graph.values.clear()
        graph.entrances.clear()
        if roots:
            torch.autograd.backward(roots, seeds)
        del roots, seeds
        for name, found in graph.found.items():
            if found:
                self._put_gradient(micro_batch, name, found.pop())

    def _put_gradient(self, micro_batch: int, name: str, gradient: Tensor) -> None:
        self._gradients.forget(micro_batch, [name])
        keep = self._plan.boundary == "device" and name not in self._host.writes
        self._gradients.put(micro_batch, name, gradient, keep=keep, save=not keep)

    def _run_layers(
        self,
        visit: Visit,
        tensors: Tensors,
        micro_batch: int,
        taken: Mapping[str, Any],
        wanted: Sequence[str],
        graph: WaitingGraph | SegmentRun | None = None,
    ) -> dict[str, Any]:
        """Run the segment's layers, within `graph` if it waits; return the wanted values."""
        start, _ = visit.layers
        values = dict(taken)
        again = visit.phase is Phase.BACKWARD
        draws = not again and visit.phase is not Phase.EVALUATE
        with self._random.alone:
            if again:
                self._random.replay(micro_batch, start)
            for index, layer, spent in self._links.of(visit.layers, tuple(wanted)):
                if draws:
                    self._random.reach(micro_batch, index, first=index == start)
                arguments = [values[name] for name in layer.reads]
                written: Sequence[Any]
                if isinstance(graph, SegmentRun):
                    written = graph.layer(arguments)
                else:
                    buffers = self.buffers.of(index, micro_batch, visit.phase, visit.leaves)
                    own = {**tensors[index - start], **buffers}
                    if graph is None:
                        written = layer.run(own, arguments)
                    else:
                        written = graph.layer(index, layer, own, arguments)
                del arguments
                values.update(zip(layer.writes, written, strict=True))
                del written
                for name in spent:
                    del values[name]
            if draws:
                self._random.leave(micro_batch)
        return values


def _forget(_: Any) -> Any:
    """Keep nothing of what autograd saves."""
    return None


class _Graph(NamedTuple):
    """One micro-batch's forward through a segment, ready for backward."""

    found: dict[str, list[Tensor]]
    """Takes the gradients of the segment's inputs."""
    entrances: dict[str, Tensor]
    """Those inputs, as its layers get them."""
    values: dict[str, Any]
    """What the segment writes."""
    weights: list[Weight]
    """Those that entered as views."""


def _shared_again(chain: Chain, layers: Layers) -> frozenset[int]:
    """Return the parameters that several of the layers use, and later ones too, by `id`."""
    start, stop = layers
    return frozenset(
        key
        for key, users in chain.users.items()
        if sum(start <= user < stop for user in users) > 1 and users[-1] >= stop
    )
