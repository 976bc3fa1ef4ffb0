"""What the profile measures reaches the predicted step, and is counted once."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from atomtrain.analysis import LayerTime
from atomtrain.planning.cost.costing import Costing, Given, Steps
from atomtrain.planning.cost.segments import SavedTensors
from atomtrain.planning.cost.timeline import StepTime
from atomtrain.planning.plan.machine import Machine
from atomtrain.planning.plan.shape import Shape, training_visits
from tests.unit.analysis.test_profile import parts, small_gpt

MICRO_BATCHES = 3
FAST = Machine(
    name="fast",
    load_bytes_per_s=1e15,
    unload_bytes_per_s=1e15,
    update_parameters_per_s=1e15,
    device_memory_bytes=1 << 30,
    host_memory_bytes=1 << 34,
)
ESTIMATED = LayerTime(1e-3, 3e-3)


@pytest.fixture(scope="module")
def model():
    with torch.device("meta"):
        chain, costs, _ = parts(small_gpt(4))
    return chain, costs


@pytest.fixture(scope="module")
def shape(model) -> Shape:
    layers = len(model[0].layers)
    bounds = (0, 2, 4, layers)
    return Shape(bounds[:-1], bounds, 2, 1)


def step(model, shape: Shape, time: LayerTime = ESTIMATED, **rates: float) -> StepTime:
    chain, costs = model
    times = {cost.kind: time for cost in costs.layers}
    machine, steps = dataclasses.replace(FAST, **rates), Steps(micro_batches=MICRO_BATCHES)
    given = Given(chain=chain, costs=costs, times=times, machine=machine)
    return Costing(given, steps).step(shape)


def test_each_visit_costs_once_for_each_micro_batch(model, shape: Shape) -> None:
    visits = len(training_visits(shape))
    extra_s = step(model, shape, visit_s=0.5).compute_s - step(model, shape).compute_s
    assert extra_s == pytest.approx(0.5 * visits * MICRO_BATCHES)


def test_each_load_and_unload_starts_once(model, shape: Shape) -> None:
    visits = training_visits(shape)
    slow = step(model, shape, copy_s=1.0)
    loads = sum(visit.load for visit in visits)
    unloads = sum(visit.gradient is not None for visit in visits)
    assert slow.load_s >= loads
    assert slow.unload_s >= unloads


def test_copies_and_updates_take_from_compute(model, shape: Shape) -> None:
    chain, _ = model
    parameters = sum(parameter.numel() for parameter in chain.parameters)
    plain = step(model, shape)
    updating = step(model, shape, compute_s_per_update=1e-3)
    assert updating.compute_s - plain.compute_s == pytest.approx(1e-3 * parameters)
    copying = step(model, shape, compute_s_per_copied_byte=1e-6)
    # All parameters come at least once, all gradients leave once.
    assert copying.compute_s - plain.compute_s >= 1e-6 * 2 * 4 * parameters


def test_what_is_offloaded_takes_from_compute_each_way(model, shape: Shape) -> None:
    chain, costs = model
    saved = SavedTensors(chain, costs)
    ahead = shape.backward_bounds[:-1]
    mixed = shape._replace(activations=("offload", "keep", "recompute"))
    moved = saved.of(*ahead[:2])
    for rate, count in (("storage", moved.sent), ("byte", moved.sent_bytes)):
        price = {f"compute_s_per_offloaded_{rate}": 1e-3}
        extra_s = step(model, mixed, **price).compute_s - step(model, mixed).compute_s
        assert extra_s == pytest.approx(2e-3 * MICRO_BATCHES * count)
        assert step(model, shape, **price) == step(model, shape)


def test_what_is_made_again_takes_from_compute_in_backward(model, shape: Shape) -> None:
    """As long as an update on the device that moves as many bytes: 28 for a parameter."""
    _, costs = model
    mixed = shape._replace(activations=("offload", "keep", "recompute"))
    again = sum(cost.saved.remade_traffic_bytes for cost in costs.layers[:2])
    assert again > 0
    slow = {"device_update_parameters_per_s": 1e6}
    extra_s = step(model, mixed, **slow).compute_s - step(model, mixed).compute_s
    assert extra_s == pytest.approx(MICRO_BATCHES * again / 28e6, rel=1e-4)
    assert step(model, shape, **slow) == step(model, shape)


def test_what_offloading_takes_is_measured_or_estimated_but_not_both(model, shape: Shape) -> None:
    mixed = shape._replace(activations=("offload", "keep", "recompute"))
    rates = {"compute_s_per_offloaded_storage": 1e-3, "device_update_parameters_per_s": 1e6}
    measured, half = LayerTime(1e-3, 3e-3, 0.25, 0.5), LayerTime(1e-3, 3e-3, 0.25, None)
    extra_s = step(model, mixed, measured).compute_s - step(model, mixed).compute_s
    offloaded_layers = mixed.backward_bounds[1]
    assert extra_s == pytest.approx(MICRO_BATCHES * offloaded_layers * (0.25 + 0.5))
    assert step(model, mixed, measured, **rates).compute_s == pytest.approx(
        step(model, mixed, measured).compute_s, rel=1e-6
    )
    assert step(model, mixed, half, **rates) == step(model, mixed, **rates)
    # Copies of what is offloaded went on while it was measured; those of parameters did not.
    copying = {"compute_s_per_copied_byte": 1e-6}

    def copied_s(*time: LayerTime) -> float:
        slow, fast = (step(model, mixed, *time, **rate).compute_s for rate in (copying, {}))
        return slow - fast

    moved = SavedTensors(*model).of(0, offloaded_layers)
    each_way_s = MICRO_BATCHES * 1e-6 * moved.sent_bytes
    assert copied_s() - copied_s(measured) == pytest.approx(2 * each_way_s)
    assert step(model, shape, measured) == step(model, shape)


def test_a_link_that_both_directions_share_is_slower(model, shape: Shape) -> None:
    rates = {"load_bytes_per_s": 1e6, "unload_bytes_per_s": 1e6}
    apart = step(model, shape, **rates)
    shared = step(model, shape, **rates, both_ways_share=0.5)
    assert apart.step_s < shared.step_s <= 2.1 * apart.step_s
