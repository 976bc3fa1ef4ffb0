"""Which of the plans that fit is taken, and workspaces by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from atomtrain.analysis import chain_of, layer_costs
from atomtrain.errors import PlanError
from atomtrain.models import GPT, preset
from atomtrain.planning import Layout
from atomtrain.planning.cost.visit_memory import Workspaces
from atomtrain.planning.plan.updating import two_moments
from tests.unit.planning.test_plan import EXAMPLE, machine, plan


@pytest.fixture(scope="module")
def tiny() -> Any:
    with torch.device("meta"):
        model = GPT(preset("tiny"))
    traced = chain_of(model, EXAMPLE)
    return traced.chain, layer_costs(traced.chain, traced.bind(EXAMPLE))


def test_of_plans_that_are_about_as_fast_the_leanest_is_taken(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = plan(tiny, machine(link=1e9), host_layers=0)
    monkeypatch.setattr("atomtrain.planning.search.search.EQUAL", 0.0)
    fastest = plan(tiny, machine(link=1e9), host_layers=0)
    assert fastest.step_s <= taken.step_s <= 1.01 * fastest.step_s
    assert taken.device_peak_bytes < fastest.device_peak_bytes


@pytest.mark.parametrize("link", [1e10, 5e9, 3e9])
def test_memory_that_spares_waiting_is_used(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, link: float
) -> None:
    """Among plans of one kind less memory is worth a 500th of a step at most, not a hundredth."""
    kind: dict[str, Any] = {
        "host_layers": 0, "activations": "recompute", "boundary": "device", "device_blocks": (),
        "segments": 4,
    }  # fmt: skip
    taken = plan(tiny, machine(link=link), **kind)
    monkeypatch.setattr("atomtrain.planning.search.choice.AS_FAST", 0.0)
    fastest = plan(tiny, machine(link=link), **kind)
    assert fastest.step_s <= taken.step_s <= 1.002 * fastest.step_s


def test_host_memory_may_be_used_to_the_last_byte(tiny: Any) -> None:
    fixed: dict[str, Any] = {
        "host_layers": 0, "activations": "recompute", "boundary": "device", "device_blocks": (),
    }  # fmt: skip
    needed = plan(tiny, machine(), **fixed).host_bytes
    assert plan(tiny, machine(host=needed), **fixed).host_bytes == needed
    with pytest.raises(PlanError, match="host memory"):
        plan(tiny, machine(host=needed - 1), **fixed)


def test_workspaces_of_segments() -> None:
    """Three layers that hand on 40 bytes each; what they need is made up."""
    example = (torch.zeros(2, 5), torch.zeros(1))
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 1))
    traced = chain_of(model, example, torch.sum)
    costs = layer_costs(traced.chain, traced.bind(example))
    needs = [(100, 10, 200, 1000), (500, 20, 300, 50), (30, 40, 60, 70)]
    layers = [
        dataclasses.replace(
            cost, forward_bytes=forward, kept_bytes=kept, graph_bytes=graph, backward_bytes=backward
        )
        for cost, (forward, kept, graph, backward) in zip(costs.layers, needs, strict=True)
    ]
    of = Workspaces(traced.chain, costs._replace(layers=tuple(layers)), Layout(traced.chain)).of
    assert of(0, 1) == (100, 200, 10 + 1000)
    # In forward the first layer's value stays; in backward its gradient is there beside the graph.
    assert of(0, 2) == (40 + 500, 10 + 300, 10 + 40 + 1000)
    assert of(1, 3) == (500, 300, 20 + 40 + 70)


def test_state_on_the_device_counts_the_small_tensors_too() -> None:
    example = (torch.zeros(2, 5), torch.zeros(1))
    chain = chain_of(nn.Sequential(nn.Linear(5, 3)), example, torch.sum).chain
    (block,) = two_moments(chain).of_blocks(chain, Layout(chain))
    assert block.state_bytes == 2 * 4 * (15 + 3)
    assert block.device_bytes == block.state_bytes + 2 * 16
    assert (block.host_work, block.device_work) == (18, 18)
