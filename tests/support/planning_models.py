"""Random shapes of plans, and engines that run a given shape."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from atomtrain.engine.planner import Planner
from atomtrain.planning import Layout, Plan, Shape
from atomtrain.planning.cost.costing import Costing, Given, Steps
from atomtrain.planning.cost.memory import MemoryModel
from atomtrain.planning.plan.kept import check_shape
from atomtrain.planning.plan.shape import ACTIVATIONS, Activation
from atomtrain.planning.search.problem import plan_of


def use_shape(monkeypatch: pytest.MonkeyPatch, shape: Shape) -> None:
    """Let every engine run this shape, whatever the planner would choose."""

    def plan(planner: Planner, micro_batches: int) -> Plan:
        layout = Layout(planner.chain)
        check_shape(shape, len(planner.chain.layers), layout.blocks)
        memory = memory_of(planner, micro_batches, shape)
        steps = Steps(micro_batches=micro_batches, updates=planner.updates, spends=memory.spends)
        costing = Costing(_given(planner, shape), steps)
        return plan_of(shape, memory, costing, planner.machine)

    monkeypatch.setattr(Planner, "plan", plan)


def memory_of(planner: Planner, micro_batches: int, shape: Shape) -> MemoryModel:
    """Return what tells the memory that a shape of a planner's model needs."""
    given = _given(planner, shape)
    spends = planner.options.spend_gradients
    return MemoryModel(given.chain, given.costs, micro_batches, planner.updates, spends=spends)


def _given(planner: Planner, shape: Shape) -> Given:
    return planner.given if shape.remakes else planner.given.sending_all()


def random_shape(
    source: random.Random,
    layers: int,
    blocks: int,
    resident: Sequence[int] | None = None,
    mixed: bool | None = None,
) -> Shape:
    """Return a shape that can be run on a chain of so many layers and blocks.

    With `mixed` any of its segments may be kept or offloaded; `None` leaves that to chance.
    """
    backward = random_bounds(source, layers)
    forward = random_bounds(source, backward[-2])
    activations: list[Activation] = ["recompute"] * (len(backward) - 1)
    if source.random() < 0.6 if mixed is None else mixed:
        if source.random() < 0.7:
            forward = backward[:-1]
        ahead = set(itertools.pairwise(forward))
        for index, pair in enumerate(itertools.pairwise(backward[:-1])):
            if pair in ahead:
                activations[index] = source.choice(ACTIVATIONS)
    if resident is None:
        share = source.choice([0.0, 0.3, 0.7])
        resident = [block for block in range(blocks) if source.random() < share]
    share = source.choice([0.0, 0.5, 1.0])
    device = [block for block in resident if source.random() < share]
    return Shape(
        forward,
        backward,
        source.randint(1, 3),
        source.randint(1, 2),
        source.choice(["device", "host"]),
        tuple(resident),
        0,
        tuple(activations),
        tuple(device),
        source.random() < 0.5,
    )


def random_bounds(source: random.Random, layers: int) -> tuple[int, ...]:
    """Return a random partition of so many layers."""
    share = source.choice([0.2, 0.5, 0.8])
    inner = [cut for cut in range(1, layers) if source.random() < share]
    return (0, *inner, layers) if layers else (0,)
