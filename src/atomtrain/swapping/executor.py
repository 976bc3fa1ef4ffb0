"""Runs a plan: the vertical schedule over all segments and micro-batches of a step.

The only executor; devices differ, it does not. It runs on the caller's thread, which is the
compute stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from atomtrain.analysis.chain import Chain
from atomtrain.analysis.costs import ChainCosts
from atomtrain.planning.plan import Plan
from atomtrain.planning.schedule import Phase, Visit, evaluation_visits, training_visits
from atomtrain.swapping.buffers import DeviceBuffers
from atomtrain.swapping.carried import Carried, HostPool, leaf_of
from atomtrain.swapping.device import Device
from atomtrain.swapping.randomness import Randomness
from atomtrain.swapping.slots import Slots, Tensors
from atomtrain.swapping.store import HostStore
from atomtrain.swapping.updates import Updates

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
        updates: Updates,
    ) -> None:
        """Allocate slots and buffers; call inside `Device.computing`."""
        self._chain, self._costs, self._plan = chain, costs, plan
        self._device, self._updates = device, updates
        self.slots = Slots(chain, plan, store, device, updates)
        self.buffers = DeviceBuffers(chain, costs, device)
        pool = HostPool(device)
        self._values = Carried(device, pool)
        self._gradients = Carried(device, pool)
        self._random = Randomness(device.generator, any(layer.random for layer in costs.layers))
        self._training = training_visits(plan.segments, plan.slots, plan.gradient_buffers)
        self._evaluation = evaluation_visits(plan.segments, plan.slots)
        self._losses: list[Tensor] = []
        self._count = 0

    def train(self, micro_batches: Sequence[Values]) -> list[Tensor]:
        """Run forward and backward; gradients go to `Updates`. Return the losses (0-d)."""
        self._random.begin(len(micro_batches))
        backward = [visit.segment for visit in self._training if visit.gradient is not None]
        self._updates.begin_step({s: self.slots.layers(s) for s in backward})
        losses = self._run(self._training, micro_batches)
        self._updates.finish_step()
        self._random.finish()
        return losses

    def evaluate(self, micro_batches: Sequence[Values]) -> list[Tensor]:
        """Run forward only. Return the losses (0-d)."""
        return self._run(self._evaluation, micro_batches)

    def _run(self, visits: Sequence[Visit], micro_batches: Sequence[Values]) -> list[Tensor]:
        self._losses, self._count = [], len(micro_batches)
        for index, micro_batch in enumerate(micro_batches):
            for name in self._chain.inputs:
                self._values.put_input(index, name, micro_batch[name])
        self.slots.begin(visits)
        for index, visit in enumerate(visits):
            tensors = self.slots.enter(index)
            self._visit(visit, tensors)
            del tensors
            self.slots.leave(index)
        self._values.clear()
        self._gradients.clear()
        losses, self._losses = self._losses, []
        return losses

    def _visit(self, visit: Visit, tensors: Tensors) -> None:
        start, stop = self.slots.layers(visit.segment)
        reads, writes = self._chain.reads(start, stop), self._chain.writes(start, stop)
        backward = visit.gradient is not None
        # Gradients of values that pass this segment by stay where they are.
        incoming = [*writes, *reads] if backward else []
        for micro_batch in range(self._count):
            self._values.prefetch(micro_batch, reads)
            self._gradients.prefetch(micro_batch, incoming)
            taken = {name: self._values.take(micro_batch, name) for name in reads}
            if micro_batch + 1 < self._count:
                self._values.prefetch(micro_batch + 1, reads)
                self._gradients.prefetch(micro_batch + 1, incoming)
            if backward:
                self._backward(visit, tensors, micro_batch, taken, writes)
            else:
                self._forward(visit, tensors, micro_batch, taken, writes)
            del taken
            self._values.drop(micro_batch, reads)
            if backward:
                self._values.forget(micro_batch, writes)
                self._gradients.forget(micro_batch, writes)

    def _forward(
        self,
        visit: Visit,
        tensors: Tensors,
        micro_batch: int,
        taken: dict[str, Any],
        writes: Sequence[str],
    ) -> None:
        training = visit.phase is Phase.FORWARD
        if training:
            self._random.enter(micro_batch, visit.segment)
        with torch.no_grad():
            values = self._run_layers(visit, tensors, micro_batch, taken)
        taken.clear()
        if training:
            self._random.leave(micro_batch)
        for name in writes:
            if name == self._chain.loss:
                self._losses.append(values[name])
            else:
                keep, save = self._keep(visit, name), self._save(visit, name)
                self._values.put(micro_batch, name, values.pop(name), keep=keep, save=save)

    def _backward(
        self,
        visit: Visit,
        tensors: Tensors,
        micro_batch: int,
        taken: dict[str, Any],
        writes: Sequence[str],
    ) -> None:
        if visit.phase is Phase.TURN:
            self._random.enter(micro_batch, visit.segment)
        else:
            self._random.replay(micro_batch, visit.segment)
        leaves = {
            name: leaf_of(value, self._costs.values[name].requires_grad)
            for name, value in taken.items()
        }
        taken.clear()
        with torch.enable_grad():
            inputs, roots, seeds = self._passing(micro_batch, leaves)
            values = self._run_layers(visit, tensors, micro_batch, inputs)
            if visit.phase is Phase.TURN:
                self._random.leave(micro_batch)
                loss = values[self._chain.loss]
                self._losses.append(loss.detach())
                roots.append(loss / self._count)
                seeds.append(None)
                del loss
            for name in writes:
                if (micro_batch, name) in self._gradients and name not in leaves:
                    roots.append(values[name])
                    seeds.append(self._gradients.take(micro_batch, name))
            values.clear()
            inputs.clear()
            if roots:
                torch.autograd.backward(roots, seeds)
        del roots, seeds
        for name, leaf in leaves.items():
            if isinstance(leaf, Tensor) and leaf.grad is not None:
                self._gradients.forget(micro_batch, [name])
                keep = self._plan.boundary == "device"
                self._gradients.put(micro_batch, name, leaf.grad, keep=keep, save=not keep)

    def _passing(
        self, micro_batch: int, leaves: Mapping[str, Any]
    ) -> tuple[dict[str, Any], list[Tensor], list[Tensor | None]]:
        """Return the segment's inputs, and roots for those that have a gradient already.

        A value that later segments have read comes with their gradient. It enters through a view,
        and the gradient is given to the view, so that autograd adds this segment's contributions
        to it one by one, in the order in which it adds them when nothing is swapped.
        """
        inputs: dict[str, Any] = {}
        roots: list[Tensor] = []
        seeds: list[Tensor | None] = []
        for name, leaf in leaves.items():
            inputs[name] = leaf
            if (micro_batch, name) in self._gradients:
                inputs[name] = leaf.view_as(leaf)
                roots.append(inputs[name])
                seeds.append(self._gradients.take(micro_batch, name))
        return inputs, roots, seeds

    def _run_layers(
        self, visit: Visit, tensors: Tensors, micro_batch: int, taken: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Run the segment's layers; return the values that are read outside of it."""
        start, stop = self.slots.layers(visit.segment)
        values = dict(taken)
        for index in range(start, stop):
            layer = self._chain.layers[index]
            with self.buffers.of(index, micro_batch, visit.phase) as buffers:
                arguments = [values[name] for name in layer.reads]
                written = layer.run({**tensors[index - start], **buffers}, arguments)
            del arguments
            values.update(zip(layer.writes, written, strict=True))
            del written
            needed = set(self._chain.reads(index + 1, stop)) if index + 1 < stop else set()
            needed.update(self._chain.writes(start, stop))
            for name in [name for name in values if name not in needed]:
                del values[name]
        return values

    def _keep(self, visit: Visit, name: str) -> bool:
        """Return whether a value stays on the device until the next visit."""
        next_layers = self.slots.layers(visit.segment + 1)
        return self._plan.boundary == "device" and name in self._chain.reads(*next_layers)

    def _save(self, visit: Visit, name: str) -> bool:
        """Return whether a value is needed on the host later."""
        last = self._plan.segments - 1
        readers = [
            segment
            for segment in range(visit.segment + 1, self._plan.segments)
            if name in self._chain.reads(*self.slots.layers(segment))
        ]
        if visit.phase is Phase.FORWARD and any(segment != last for segment in readers):
            return True
        return readers != [visit.segment + 1] or self._plan.boundary == "host"
