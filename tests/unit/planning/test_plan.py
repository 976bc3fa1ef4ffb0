"""Plans: chosen for budget and link, serialisable, readable."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atomtrain.analysis import LayerTime, chain_of, layer_costs
from atomtrain.errors import PlanError
from atomtrain.models import GPT, preset
from atomtrain.planning import Layout, Machine, Plan, Request, make_plan
from atomtrain.planning.catalogue import DISKS
from atomtrain.planning.cost.costing import Given, spans_of
from atomtrain.planning.cost.memory import MemoryModel
from atomtrain.planning.plan.disk import DiskRequest, on_disk_up_to, two_moments
from atomtrain.planning.search.choice import AS_FAST
from atomtrain.planning.search.search import TooSlowError
from atomtrain.units import parse_bytes

BATCH = torch.zeros(2, 64, dtype=torch.long)
EXAMPLE = {"input_ids": BATCH, "labels": BATCH}


@pytest.fixture(scope="module")
def chain_and_costs():
    with torch.device("meta"):
        model = GPT(preset("tiny"))
    traced = chain_of(model, EXAMPLE)
    return traced.chain, layer_costs(traced.chain, traced.bind(EXAMPLE))


def machine(memory: str = "64MiB", link: float = 4e9, host: int = 1 << 34) -> Machine:
    return Machine(
        name="test",
        load_bytes_per_s=link,
        unload_bytes_per_s=link,
        update_parameters_per_s=1e9,
        device_memory_bytes=parse_bytes(memory),
        host_memory_bytes=host,
    )


def plan(chain_and_costs, on: Machine, micro_batches: int = 2, **fixed: int) -> Plan:
    chain, costs = chain_and_costs
    times = {layer.kind: LayerTime(1e-3, 3e-3) for layer in costs.layers}
    return make_plan(chain, costs, times, on, Request(micro_batches=micro_batches, **fixed))


def test_a_plan_is_json_and_is_readable(chain_and_costs) -> None:
    made = plan(chain_and_costs, machine())
    data = json.loads(json.dumps(made.to_json()))
    assert {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()} == vars(made)
    text = made.describe()
    for word in ("segments", "device", "host", "step", "bound by"):
        assert word in text


def test_a_plan_tells_what_is_offloaded_whole(chain_and_costs) -> None:
    made = plan(chain_and_costs, machine(), host_layers=0, activations="offload", segments=3)
    assert "offload" in made.activations
    assert made.remakes
    whole = dataclasses.replace(made, remakes=False)
    assert not whole.shape.remakes
    assert "offloaded whole" in whole.describe()
    assert "offloaded whole" not in made.describe()


def test_what_is_one_is_told_as_one(chain_and_costs) -> None:
    ones = {"slots": 1, "gradient_buffers": 1, "micro_batches": 1, "host_layers": 1}
    made = plan(chain_and_costs, machine(), host_layers=0)
    text = dataclasses.replace(made, **ones).describe()
    for words in ("1 slot of", "1 gradient buffer,", "1 micro-batch", "the first layer:"):
        assert words in text
    text = dataclasses.replace(made, **{name: 2 for name in ones}).describe()
    for words in ("2 slots of", "2 gradient buffers,", "2 micro-batches:", "the first 2 layers:"):
        assert words in text


def test_what_backward_runs_forward_again(chain_and_costs) -> None:
    made = plan(chain_and_costs, machine(), host_layers=0)
    assert made.backward_bounds[-1] == 6
    for bounds, activations, expected in (
        ((0, 6), (), ()),
        ((0, 2, 4, 6), (), (0, 1, 2, 3)),
        ((1, 2, 4, 5, 6), ("recompute", "offload", "recompute", "recompute"), (1, 4)),
    ):
        of = dataclasses.replace(made, backward_bounds=bounds, activations=activations)
        assert of.recomputed == expected


def test_plenty_of_memory_needs_no_recomputing_and_no_detour(chain_and_costs) -> None:
    made = plan(chain_and_costs, machine("1GiB", link=1e9), host_layers=0)
    assert not made.recomputed
    assert "offload" not in made.activations
    # A second load would hide behind compute, and save a slot as large as the model.
    total_bytes = Layout(chain_and_costs[0]).total_bytes
    assert total_bytes * 0.999 <= made.load_s * 1e9 <= total_bytes * 2


def test_a_slower_link_never_makes_a_faster_plan(chain_and_costs) -> None:
    times = [plan(chain_and_costs, machine("2MiB", link)).step_s for link in (1e10, 1e8, 1e7, 1e6)]
    assert times == sorted(times)


@pytest.mark.slow
def test_more_memory_never_makes_a_slower_plan(chain_and_costs) -> None:
    times = []
    for memory in ("1700KiB", "2MiB", "3MiB", "8MiB", "64MiB"):
        times.append(plan(chain_and_costs, machine(memory, 1e7)).step_s)
    for less, more in itertools.pairwise(times):
        assert more <= less * 1.02  # plans within 1% of the best are equal


@pytest.mark.slow
def test_the_chosen_plan_is_within_a_hundredth_of_all_that_fit(chain_and_costs) -> None:
    chain, costs = chain_and_costs
    on = machine("2MiB", 1e8)
    best = plan(chain_and_costs, on)
    memory = MemoryModel(chain, costs, 2)
    for segments in range(1, len(chain.layers) + 1):
        for slots in (2, 3):
            try:
                other = plan(chain_and_costs, on, segments=segments, slots=slots, host_layers=0)
            except PlanError:
                continue
            assert memory.device_bytes(other.shape) == other.device_peak_bytes
            assert best.step_s <= other.step_s * 1.01


@pytest.mark.slow
def test_layers_run_on_the_host_where_that_is_better(chain_and_costs) -> None:
    tight = machine("2MiB", 1e8)
    there, here = (plan(chain_and_costs, tight, host_layers=n) for n in (1, 0))
    assert there.device_peak_bytes < here.device_peak_bytes
    assert there.load_s < here.load_s
    for on in (tight, machine("1GiB", 1e9), machine("1GiB", 1e6)):
        both = []
        for host_layers in (0, 1):
            both.append(plan(chain_and_costs, on, host_layers=host_layers))
        best = plan(chain_and_costs, on)
        least_s = min(made.step_s for made in both)
        equal = [made for made in both if made.step_s <= (1 + AS_FAST) * least_s]
        assert best in equal
        assert best.device_peak_bytes == min(made.device_peak_bytes for made in equal)


@pytest.mark.parametrize("on_disk", ["nothing", "moments", "parameters"])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("host_layers", [0, 1])
def test_spans_end_with_the_step(
    chain_and_costs, host_layers: int, clips: bool, on_disk: str
) -> None:
    """Also where layers run on the host, before the device begins and after it is done."""
    chain, costs = chain_and_costs
    on = dataclasses.replace(
        machine("2MiB", 1e8), host_copy_bytes_per_s=1e9,
        storage_read_bytes_per_s=2e8, storage_write_bytes_per_s=1e8,
    )  # fmt: skip
    states = two_moments(chain)
    disk = DiskRequest(states=states, on_disk=on_disk_up_to(on_disk))
    made = plan(chain_and_costs, on, host_layers=host_layers, clips=clips, disk=disk)
    times = {layer.kind: LayerTime(1e-3, 3e-3) for layer in costs.layers}
    given = Given(chain=chain, costs=costs, times=times, machine=on)
    spans = spans_of(made, given, states=states, clips=clips)
    assert max(span.end_s for span in spans) == pytest.approx(made.step_s)
    first, last = spans[0], spans[-1]
    assert ((first.stream, first.label) == ("update", "forward 0")) == (host_layers == 1)
    if host_layers:
        device = [span for span in spans[1:-1] if span.end_s > span.start_s]
        assert 0 == first.start_s < first.end_s <= min(span.start_s for span in device)
        assert last.label == "backward 0"
        assert last.start_s == max(span.end_s for span in device) < last.end_s


def test_resident_blocks_are_not_fixed_with_layers_on_the_host(chain_and_costs) -> None:
    with pytest.raises(PlanError, match="cannot be fixed together"):
        plan(chain_and_costs, machine(), host_layers=1, resident=(2,))


def test_too_little_memory_names_the_layer_and_the_least_budget(chain_and_costs) -> None:
    with pytest.raises(PlanError, match=r"layer 'blocks\.0' alone needs") as caught:
        plan(chain_and_costs, machine("100KiB"))
    least = str(caught.value).split("at least ")[1].split(",")[0]
    assert plan(chain_and_costs, machine(least)).device_peak_bytes <= parse_bytes(least)
    with pytest.raises(PlanError, match="fewer than 99 slots"):
        plan(chain_and_costs, machine(least), slots=99)


def test_too_little_host_memory(chain_and_costs) -> None:
    on, states = machine(host=1 << 20), two_moments(chain_and_costs[0])
    begins = r"^training this model takes [0-9.]+ MiB of host memory, 1\.0 MiB are there; choose a "
    for fixed, ends in (
        ({}, r"smaller model, or let part of its state lie on disk \(--disk\)$"),
        ({"devices": 2}, r"smaller model or fewer devices, or let part .* \(--disk\)$"),
    ):
        with pytest.raises(PlanError) as caught:
            plan(chain_and_costs, on, **fixed)
        told = str(caught.value).replace(" on 2 devices", "")
        assert re.search(begins + ends, told), told
    on = DISKS["nvme-pcie4"].of(on)
    with pytest.raises(PlanError) as caught:
        plan(chain_and_costs, on, disk=DiskRequest(states=states))
    told = str(caught.value)
    assert "with everything on disk that can be, 1.0 MiB are there; choose a smaller" in told
    assert told.endswith("smaller model"), "what is on disk already is not advised"


@pytest.mark.parametrize("disk_is_fast", [True, False])
def test_what_is_too_slow_without_offloading_is_looked_for_with_more_on_disk(
    chain_and_costs, monkeypatch: pytest.MonkeyPatch, disk_is_fast: bool
) -> None:
    """Offloading takes too much host memory, and recomputing too long, while all is in memory."""

    def best(problems: Any, on: Machine, below_s: float) -> Any:
        ((asked, on_disk),) = (problem.key for problem in problems)
        if not asked.offload or (on_disk and not disk_is_fast):
            raise TooSlowError("too slow")
        host_bytes = 1 if on_disk else on.host_memory_bytes + 1
        return SimpleNamespace(
            step_s=0.5, host_bytes=host_bytes, activations=("offload",), on_disk=on_disk
        )

    def problems(_: Any, asked: Request, on_disk: Any) -> Any:
        return [SimpleNamespace(least_host_bytes=0, key=(asked, on_disk))]

    monkeypatch.setattr("atomtrain.planning.search.search._best", best)
    monkeypatch.setattr("atomtrain.planning.search.search.problems_of", problems)
    chain, costs = chain_and_costs
    request = Request(micro_batches=2, disk=DiskRequest(states=two_moments(chain)), clips=True)
    if disk_is_fast:
        assert make_plan(chain, costs, {}, machine(), request, 1.0).on_disk == ("moments",)
    else:
        with pytest.raises(TooSlowError):
            make_plan(chain, costs, {}, machine(), request, 1.0)


def test_impossible_requests(chain_and_costs) -> None:
    with pytest.raises(PlanError, match="layers allow 1 to 6"):
        plan(chain_and_costs, machine(), segments=99)
    with pytest.raises(PlanError, match="at least 1"):
        Request(micro_batches=0)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_machine_of_nonsense(value: float) -> None:
    with pytest.raises(PlanError, match="load_bytes_per_s"):
        dataclasses.replace(machine(), load_bytes_per_s=value)
