"""Updates one step late: steps follow each other as fast as compute or the updates allow."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from steady_steps import steady_step_s
from test_clipped_planning import REQUEST, Built, built_with, planned

from atomtrain.analysis import chain_of
from atomtrain.errors import PlanError
from atomtrain.models import GPT, GPTConfig
from atomtrain.planning import Layout, Plan
from atomtrain.planning.costing import Costing, Given, Steps, period_of, spans_of
from atomtrain.planning.delayed import added_up, delayed_updates, undelayed
from atomtrain.planning.disk import DiskRequest
from atomtrain.planning.schedule import training_visits
from atomtrain.planning.shape import Shape

LATE = dataclasses.replace(REQUEST, delays=True)


def given_of(built: Built) -> Given:
    return Given(chain=built.chain, costs=built.costs, times=built.times, machine=built.machine)


@pytest.fixture
def tied_layout() -> Layout:
    """Of a GPT whose embedding and head share their weight."""
    config = GPTConfig(layers=2, width=8, heads=1, head_width=8, vocabulary=16, context=8)
    tokens = torch.zeros((1, 8), dtype=torch.long)
    return Layout(chain_of(GPT(config), {"input_ids": tokens, "labels": tokens}).chain)


def steady_s(built: Built, plan: Plan) -> float:
    """Return the simulated time from step to step."""
    updates = delayed_updates(None, built.chain)
    costing = Costing(given_of(built), Layout(built.chain), Steps(micro_batches=1, updates=updates))
    visits = training_visits(plan.shape)
    times = costing.visit_times(plan.shape, visits)
    return steady_step_s(visits, times, clips=True, late=True)


@pytest.mark.parametrize("update_s", [0.01, 0.5, 2.0, 8.0])
def test_a_predicted_step_is_that_from_step_to_step(update_s: float) -> None:
    built = built_with(update_s)
    plan = planned(built, LATE)
    assert plan.delays
    # An update waits for its segment's gradient, and that for the update before: one unload more.
    assert plan.period_s == pytest.approx(steady_s(built, plan), rel=0.02)
    assert period_of(plan, given_of(built), clips=True) == plan.period_s


def test_it_gains_where_forward_waits_for_updates() -> None:
    """24 s of updates, forward of 12 s and backward of 36 s."""
    built = built_with(2.0)
    exact, late = planned(built, REQUEST), planned(built, LATE)
    assert exact.step_s >= 24 + 36
    assert late.period_s < 12 + 36 + 2
    assert late.bound == "compute"
    slow = planned(built_with(8.0), LATE)
    assert slow.period_s == slow.update_s
    assert slow.bound == "host optimizer"


def test_the_timeline_has_the_updates_of_the_step_before() -> None:
    built = built_with(0.5)
    plan = planned(built, LATE)
    spans = [
        span for span in spans_of(plan, given_of(built), clips=True) if span.stream == "update"
    ]
    lengths = [span.end_s - span.start_s for span in spans if span.end_s > span.start_s]
    assert lengths == [pytest.approx(plan.update_s)]


def test_host_memory_has_room_for_an_update() -> None:
    built = built_with(0.5)
    layout = Layout(built.chain)
    scratch_bytes = delayed_updates(None, built.chain).scratch_bytes
    assert scratch_bytes == max(layout.block_bytes(block) for block in range(layout.blocks))
    exact, late = planned(built, REQUEST), planned(built, LATE)
    assert late.host_bytes - exact.host_bytes == scratch_bytes


def test_a_plan_of_late_updates_is_read_as_it_was_written() -> None:
    plan = planned(built_with(0.5), LATE)
    assert Plan.from_json(plan.to_json()) == plan
    assert "one step late" in plan.describe()


def test_blocks_whose_gradients_come_from_several_segments(tied_layout: Layout) -> None:
    shared = len(tied_layout.layers)
    layers = shared
    several = Shape(tuple(range(layers)), tuple(range(layers + 1)), 2, 2)
    assert added_up(tied_layout, several) == [shared]
    assert added_up(tied_layout, several._replace(resident_blocks=(shared,))) == []
    assert added_up(tied_layout, Shape((0,), (0, layers), 1, 1)) == []


@pytest.mark.parametrize(
    "more",
    [
        {"spends": True, "clips": False},
        {"devices": 2},
        {"disk": DiskRequest(states={})},
        {"host_layers": 1},
        {"resident": (0,), "device_blocks": (0,)},
    ],
)
def test_what_cannot_be_together_is_refused(more: dict[str, object]) -> None:
    with pytest.raises(PlanError, match="updates cannot be delayed with"):
        undelayed(dataclasses.replace(LATE, **more), built_with(0.5).chain)
