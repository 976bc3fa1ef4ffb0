"""With clipping no update begins before the last gradient: the next forward waits for them."""

from __future__ import annotations

import dataclasses

import pytest

from atomtrain.planning import Layout, Plan, Request, make_plan
from atomtrain.planning.cost.costing import Costing, Given, Steps, spans_of
from atomtrain.planning.plan.shape import training_visits
from atomtrain.planning.search.search import least_budget_bytes
from tests.support.steady_steps import steady_step_s
from tests.unit.planning.test_search import Built, Kind, Problem, build

BLOCK = Kind(640, 1.0, 3.0, 64, 64, 64, (True, False), True)
"""Computes forward in a second."""
PROBLEM = Problem((BLOCK,), (0,) * 12, (), 1, 1e6, 1e6, 1e6, 0.0, 1.0)
REQUEST = Request(
    micro_batches=1, slots=2, resident=(), device_blocks=(), activations="recompute", clips=True
)


def built_with(update_s: float) -> Built:
    """Return the problem on a host that takes so long to update a layer."""
    return build(PROBLEM._replace(update_parameters_per_s=640 / update_s))


def planned(built: Built, request: Request) -> Plan:
    parts = built.chain, built.costs, built.times
    least = least_budget_bytes(*parts, built.machine, request)
    machine = dataclasses.replace(built.machine, device_memory_bytes=int(1.2 * least))
    return make_plan(*parts, machine, request)


def steady_s(built: Built, plan: Plan) -> float:
    """Return the simulated time from step to step; updates come in forward's order."""
    given = Given(chain=built.chain, costs=built.costs, times=built.times, machine=built.machine)
    costing = Costing(given, Steps(micro_batches=1))
    visits = training_visits(plan.shape)
    times = costing.visit_times(plan.shape, visits)
    return steady_step_s(visits, times, clips=True)


@pytest.mark.parametrize("update_s", [0.01, 0.5, 2.0, 8.0])
def test_a_predicted_step_is_that_from_step_to_step(update_s: float) -> None:
    built = built_with(update_s)
    plan = planned(built, REQUEST)
    segment_update_s = update_s * 12 / (len(plan.forward_bounds) - 1)
    # Before the first visit is the update of its segment, and that of the last one before the
    # turn: neither is in the prediction.
    assert plan.step_s <= steady_s(built, plan) * (1 + 1e-9)
    assert plan.step_s >= steady_s(built, plan) - 2 * segment_update_s


def test_updates_longer_than_forward_hold_up_the_turn_with_clipping_only() -> None:
    built = built_with(2.0)
    clipped = planned(built, REQUEST)
    free = planned(built, dataclasses.replace(REQUEST, clips=False))
    # 24 s of updates, then the turn and backward of 12 layers; without, all within backward.
    assert clipped.step_s >= 24 + 12 * 3 > free.step_s
    given = Given(chain=built.chain, costs=built.costs, times=built.times, machine=built.machine)
    spans = [s for s in spans_of(clipped, given, clips=True) if s.end_s > s.start_s]
    updates = [s for s in spans if s.stream == "update"]
    # In the order in which forward wants them, under the labels of the visits they belong to.
    backward = [s.label for s in spans if s.stream == "unload"]
    assert [s.label for s in updates] == backward[::-1]
    assert updates[0].start_s == 0
    assert updates[-1].end_s == pytest.approx(24)


def test_what_is_updated_on_the_device_holds_nothing_up() -> None:
    built = built_with(8.0)
    everything = tuple(range(Layout(built.chain).blocks))
    request = dataclasses.replace(REQUEST, resident=everything, device_blocks=everything)
    assert planned(built, request).step_s < 96
