"""Plans that are kept: what was written is read, all else is refused; and taken again as it was."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import random
from typing import Any

import pytest
import torch

from atomtrain.analysis import LayerTime, chain_of, layer_costs
from atomtrain.errors import PlanError
from atomtrain.models import GPT, preset
from atomtrain.planning import Layout, Plan, Request, Shape, make_plan
from atomtrain.planning.cost.costing import Given
from atomtrain.planning.plan.disk import KINDS, DiskRequest, OnDisk, two_moments
from atomtrain.planning.plan.kept import KeptPlan
from atomtrain.planning.plan.shape import Activation
from atomtrain.planning.search import search
from atomtrain.planning.search.search import plan_again
from tests.support.planning_models import random_shape
from tests.unit.planning.test_plan import EXAMPLE, machine


def kept(shape: Shape, on_disk: OnDisk = ()) -> KeptPlan:
    return KeptPlan(made_for={"link": 1e9}, micro_batches=3, on_disk=on_disk, shape=shape)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_read_is_what_was_written(seed: int) -> None:
    source = random.Random(seed)
    written = kept(random_shape(source, 7, 9), KINDS[: source.randrange(4)])
    assert KeptPlan.from_json(json.loads(json.dumps(written.to_json()))) == written


WAITING: tuple[Activation, ...] = ("keep", "recompute", "recompute")
PLAIN = kept(Shape((0, 1, 2), (0, 1, 2, 4), 2, 1, "device", (0, 3), 0, WAITING))
DAMAGE = [
    ("shape", "slots", -1),
    ("shape", "slots", 0),
    ("shape", "slots", True),
    ("shape", "slots", 2.0),
    ("shape", "slots", 10**30),
    ("shape", "gradient_buffers", None),
    ("shape", "boundary", "disk"),
    ("shape", "boundary", ["device"]),
    ("shape", "host_layers", 1),
    ("shape", "remakes", 1),
    ("shape", "forward_bounds", []),
    ("shape", "forward_bounds", [0, 2, 2]),
    ("shape", "forward_bounds", "012"),
    ("shape", "forward_bounds", [0, "1", 2]),
    ("shape", "backward_bounds", []),
    ("shape", "backward_bounds", [4]),
    ("shape", "backward_bounds", [0, 3, 2, 4]),
    ("shape", "resident_blocks", [3, 0]),
    ("shape", "resident_blocks", {"0": 3}),
    ("shape", "device_blocks", [1]),
    ("shape", "activations", ["keep"]),
    ("shape", "activations", ["__import__('os')\n", "recompute", "recompute"]),
    ("shape", "activations", ["recompute", "recompute", "keep"]),
    (None, "shape", [0, 1]),
    (None, "shape", {}),
    (None, "made_for", [["link", 1e9]]),
    (None, "micro_batches", "3"),
    (None, "on_disk", ["masters"]),
    (None, "on_disk", "moments"),
]


@pytest.mark.parametrize(("inside", "name", "value"), DAMAGE)
def test_what_is_not_a_plan_is_refused_in_a_line(inside: str | None, name: str, value: Any) -> None:
    data = copy.deepcopy(PLAIN.to_json())
    KeptPlan.from_json(data)
    (data if inside is None else data[inside])[name] = value
    with pytest.raises(PlanError) as refused:
        KeptPlan.from_json(data)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("inside", [None, "shape"])
def test_nothing_may_be_missing_or_more(inside: str | None) -> None:
    data = PLAIN.to_json()
    names = list(data if inside is None else data[inside])
    for name in names:
        less = copy.deepcopy(data)
        del (less if inside is None else less[inside])[name]
        with pytest.raises(PlanError, match="must have"):
            KeptPlan.from_json(less)
    more = copy.deepcopy(data)
    (more if inside is None else more[inside])["code"] = "print()"
    with pytest.raises(PlanError, match="must have"):
        KeptPlan.from_json(more)


@pytest.mark.parametrize("data", [None, 3, "plan", [], {}])
def test_what_is_not_an_object_is_refused(data: Any) -> None:
    with pytest.raises(PlanError, match="a kept plan is"):
        KeptPlan.from_json(data)


@pytest.fixture(scope="module")
def tiny() -> Any:
    with torch.device("meta"):
        model = GPT(preset("tiny"))
    traced = chain_of(model, EXAMPLE)
    return traced.chain, layer_costs(traced.chain, traced.bind(EXAMPLE))


def given(tiny: Any, memory: str, link: float = 4e9) -> Given:
    chain, costs = tiny
    times = {layer.kind: LayerTime(1e-3, 3e-3) for layer in costs.layers}
    return Given(chain=chain, costs=costs, times=times, machine=machine(memory, link))


def made(of: Given, request: Request) -> Plan:
    return make_plan(of.chain, of.costs, of.times, of.machine, request)


WISHES: list[dict[str, Any]] = [
    {},
    {"host_layers": 1},
    {"activations": "offload", "segments": 3, "host_layers": 0},
    {"slots": 3, "gradient_buffers": 3, "segments": 5},
    {"boundary": "host"},
    {"resident": (), "device_blocks": (), "host_layers": 0, "offload": False},
    {"clips": True, "devices": 2, "device_blocks": ()},
    {"spends": True},
    {"activations": "keep"},
    {"segments": 1},
]
LEANER = WISHES[:-2]


@pytest.mark.parametrize(
    ("wish", "memory"),
    [*itertools.product(WISHES, ["64MiB"]), *itertools.product(LEANER, ["2MiB"])],
)
def test_a_plan_is_taken_again_as_it_was_without_a_search(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, wish: dict[str, Any], memory: str
) -> None:
    of, request = given(tiny, memory), Request(micro_batches=2, **wish)
    plan = made(of, request)
    monkeypatch.setattr(search, "_best", None)
    assert plan_again(of, request, plan.shape, plan.on_disk) == plan


@pytest.mark.parametrize("on_disk", [KINDS[:count] for count in (1, 3)])
def test_what_is_on_disk_stays_there(tiny: Any, on_disk: OnDisk) -> None:
    of = given(tiny, "6MiB")
    of = dataclasses.replace(
        of, machine=dataclasses.replace(
            of.machine, storage_read_bytes_per_s=1e9, storage_write_bytes_per_s=1e9
        )
    )  # fmt: skip
    disk = DiskRequest(states=two_moments(of.chain), on_disk=on_disk)
    request = Request(micro_batches=2, disk=disk)
    plan = made(of, request)
    assert plan.on_disk == on_disk
    assert plan_again(of, request, plan.shape, plan.on_disk) == plan
    assert plan_again(of, request, plan.shape, ()) is None


def test_what_the_plan_takes_is_told_of_this_machine_and_this_model(tiny: Any) -> None:
    request = Request(micro_batches=2)
    plan = made(given(tiny, "2MiB"), request)
    slow = plan_again(given(tiny, "1MiB", link=1e6), request, plan.shape, ())
    assert slow is not None
    assert slow.shape == plan.shape
    assert slow.step_s > 10 * plan.step_s
    assert slow.device_memory_bytes == 1 << 20
    assert slow.device_peak_bytes == plan.device_peak_bytes, "it is for others to see that it fits"


def test_a_shape_that_no_plan_of_this_model_has_is_not_taken(tiny: Any) -> None:
    of, request = given(tiny, "2MiB"), Request(micro_batches=2, host_layers=0)
    shape = made(of, request).shape
    assert plan_again(of, request, shape, ()) is not None
    assert shape.segments > 1
    layers, blocks = shape.backward_bounds[-1], Layout(of.chain).blocks
    last = layers + 1
    others = [
        shape._replace(backward_bounds=(*shape.backward_bounds[:-1], last)),
        shape._replace(slots=9),
        shape._replace(gradient_buffers=9),
        shape._replace(resident_blocks=(blocks,)),
        shape._replace(resident_blocks=(1,)),
        shape._replace(resident_blocks=(0,), device_blocks=(0, 1)),
        shape._replace(host_layers=1),
    ]
    for other in others:
        assert plan_again(of, request, other, ()) is None, other
    assert plan_again(of, request, shape, ("moments",)) is None
    for wish in ({"segments": shape.segments + 1}, {"slots": 3}, {"device_blocks": (0,)}):
        fixed = Request(micro_batches=2, **wish)
        assert plan_again(of, fixed, shape, ()) is None, wish


def test_graphs_wait_only_where_that_was_asked_for(tiny: Any) -> None:
    of = given(tiny, "64MiB")
    request = Request(micro_batches=2, activations="offload", segments=3, host_layers=0)
    shape = made(of, request).shape
    assert "offload" in shape.activations
    assert plan_again(of, request, shape, ()) is not None
    for wish in ({"offload": False}, {"activations": "recompute"}):
        other = Request(micro_batches=2, **wish)
        assert plan_again(of, other, shape, ()) is None, wish
