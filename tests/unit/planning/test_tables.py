"""What visits move and where it is updated, and what layers on the host take: figures by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from atomtrain.analysis import Chain, Layer, chain_of, layer_costs
from atomtrain.planning.cost.host import HostTime, host_choices, host_time
from atomtrain.planning.cost.tables import Traffic, between
from atomtrain.planning.plan.disk import disk_use
from atomtrain.planning.plan.layout import Layout
from atomtrain.planning.plan.machine import Machine
from atomtrain.planning.plan.updating import BlockUpdate, two_moments

OWN, SHARED, TIED = 256, 512, 4
"""Bytes of each of four layers, and of the weight that the second and the last one share; its
block."""


class Holder(nn.Module):
    def __init__(self, *parameters: nn.Parameter) -> None:
        super().__init__()
        self.held = nn.ParameterList(parameters)


@pytest.fixture
def traffic() -> Traffic:
    """Of blocks whose updates take 1, 10, 100, ... on the host and twice that on the device."""
    tied = nn.Parameter(torch.empty(SHARED // 4))
    own = [nn.Parameter(torch.empty(OWN // 4)) for _ in range(4)]
    held = [[own[0]], [own[1], tied], [own[2]], [own[3], tied]]
    layers = tuple(
        Layer(str(i), Holder(*some), (f"v{i}",), (f"v{i + 1}",)) for i, some in enumerate(held)
    )
    layout = Layout(Chain(layers, ("v0",), "v4", {}))
    updates = [BlockUpdate(0, 10.0**block, 2 * 10.0**block, 0) for block in range(5)]
    return Traffic(layout, updates, 0)


def test_sums_are_those_of_the_layers_between() -> None:
    assert between([1, 10, 100]).tolist() == [
        [0, 1, 11, 111], [0, 0, 10, 110], [0, 0, 0, 100], [0, 0, 0, 0],
    ]  # fmt: skip


def test_a_shared_weight_comes_with_each_user_and_is_updated_with_the_first(
    traffic: Traffic,
) -> None:
    moved = traffic.moved(frozenset())
    for start, stop, shared in ((0, 1, 0), (0, 2, 1), (1, 3, 1), (2, 3, 0), (2, 4, 1), (0, 4, 1)):
        n_bytes = OWN * (stop - start) + SHARED * shared
        assert moved.segment[start, stop] == moved.gradient[start, stop] == n_bytes
    assert moved.updated[0, 2] == 1 + 10 + 10_000
    assert moved.updated[2, 4] == 100 + 1000
    # Gradients that a later segment has begun come back: to all of its users but the last.
    seeds = {pair: moved.seeds[pair] for pair in ((0, 1), (0, 2), (1, 3), (2, 4), (1, 4), (0, 4))}
    assert seeds == {(0, 1): 0, (0, 2): SHARED, (1, 3): SHARED, (2, 4): 0, (1, 4): 0, (0, 4): 0}
    for none in (moved.coming, moved.leaving, moved.updated_there):
        assert not none.any()


def test_a_resident_block_comes_and_leaves_with_its_first_user(traffic: Traffic) -> None:
    moved = traffic.moved(frozenset({0, TIED}))
    assert moved.segment[0, 2] == moved.gradient[0, 2] == OWN
    assert moved.coming[0, 2] == moved.leaving[0, 2] == OWN + SHARED
    assert moved.coming[2, 4] == moved.leaving[2, 4] == 0
    assert not moved.seeds.any(), "its gradient has a place of its own"
    assert moved.updated[0, 2] == 1 + 10 + 10_000


def test_a_block_that_is_updated_on_the_device_stays_there(traffic: Traffic) -> None:
    there = frozenset({0, TIED})
    moved = traffic.moved(there, there)
    assert not moved.coming.any()
    assert not moved.leaving.any()
    assert moved.updated[0, 2] == 10
    assert moved.updated_there[0, 2] == 2 * (1 + 10_000)
    assert moved.updated_there[1, 2] == 2 * 10_000
    assert moved.updated_there[2, 4] == 0


# Layers on the host


class Drawn(nn.Embedding):
    """Loses some of what it looked up."""

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(ids), 0.5)


class Times(nn.Embedding):
    """Multiplies matrices."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) @ self.weight[:8]


@pytest.mark.parametrize(
    ("first", "able"),
    [(nn.Embedding(100, 8), True), (nn.Embedding(5, 8), False), (Drawn(100, 8), False),
     (Times(100, 8), False)],
    ids=["a large table", "a small one", "draws", "multiplies"],
)  # fmt: skip
def test_layers_that_only_look_up_in_large_tables_may_run_on_the_host(
    first: nn.Module, able: bool
) -> None:
    example = (torch.zeros(2, 3, dtype=torch.long), torch.zeros(1))
    traced = chain_of(nn.Sequential(first, nn.Linear(8, 4)), example, torch.sum)
    costs = layer_costs(traced.chain, traced.bind(example))
    assert host_choices(traced.chain, costs) == ([0, 1] if able else [0])


def test_what_a_step_takes_longer_with_layers_on_the_host() -> None:
    example = (torch.zeros(2, 3, dtype=torch.long), torch.zeros(1))
    model = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 4))
    traced = chain_of(model, example, torch.sum)
    chain, costs = traced.chain, layer_costs(traced.chain, traced.bind(example))
    machine = Machine(
        name="any", load_bytes_per_s=1.0, unload_bytes_per_s=1.0, update_parameters_per_s=1e3,
        device_memory_bytes=1, host_memory_bytes=1, host_copy_bytes_per_s=1e4,
    )  # fmt: skip
    nothing = disk_use(chain, Layout(chain), {}, ())
    rest = machine, 5, nothing, two_moments(chain)
    assert host_time(chain, costs, 0, *rest) == HostTime(0.0, 0.0)
    # Three passes over the rows, and in backward as many over the table's gradient, each of five
    # times; 800 updates.
    ahead_bytes = 5 * 3 * 192
    back_bytes = ahead_bytes + 5 * 3 * 3200
    found = host_time(chain, costs, 1, *rest)
    assert found == pytest.approx((ahead_bytes / 1e4, back_bytes / 1e4 + 0.8))
    assert found.step_s == sum(found)
    unmeasured = dataclasses.replace(machine, host_copy_bytes_per_s=None)
    assert host_time(chain, costs, 1, unmeasured, *rest[1:]) == pytest.approx(
        (ahead_bytes / (28 * 1e3), back_bytes / (28 * 1e3) + 0.8)
    )
