"""Plans for several devices of a host."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from torch import nn

from atomtrain.analysis import chain_of, layer_costs
from atomtrain.analysis.costs.profile import LayerTime
from atomtrain.cli.main import main
from atomtrain.errors import ConfigError, PlanError
from atomtrain.planning import Layout, Plan, Request, Shape, make_plan
from atomtrain.planning.advice import Setting
from atomtrain.planning.catalogue import gpu, machine_for
from atomtrain.planning.cost.memory import MemoryModel
from atomtrain.planning.plan.disk import KINDS, LOAD_PIECES, DiskRequest, OnDisk, disk_use
from atomtrain.planning.plan.disk import two_moments as states_of_two_moments
from atomtrain.planning.plan.updating import share_of, shared_updates, two_moments
from atomtrain.planning.search.batch_search import Prospect, Workload
from atomtrain.views.plans.report import forecaster
from atomtrain.views.plans.subject import Subject, subject

pytestmark = pytest.mark.slow

GIB = 1 << 30


@pytest.fixture(scope="module")
def tiny() -> Subject:
    return subject("tiny", 64)


@pytest.mark.parametrize(("count", "devices", "share"), [(1, 4, 1), (5, 2, 3), (6, 3, 2)])
def test_the_largest_share(count: int, devices: int, share: int) -> None:
    assert share_of(count, devices) == share


def test_further_devices_take_memory_and_time_of_the_host() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    chain = chain_of(model, torch.randn(2, 64), lambda output: output.sum()).chain
    alone = two_moments(chain)
    assert shared_updates(alone, chain, 1) is alone
    three = shared_updates(alone, chain, 3)
    gradients_bytes = three.scratch_bytes // 2
    assert gradients_bytes >= sum(p.nbytes for p in chain.parameters if p.requires_grad)
    # Twice 12 bytes moved for a gradient of 4, against 28 for the update itself.
    assert three.host_work == pytest.approx(alone.host_work * (1 + 24 / 28))
    assert three.device_scratch_bytes is None


def test_values_wait_once_for_each_device_whatever_lies_on_disk(tiny: Subject) -> None:
    """Gradients, state and staging memory do not depend on how many devices run the plan."""
    analysis = tiny.analyse(2)
    chain, layout = analysis.chain, Layout(analysis.chain)
    shape = Shape((0, 1, 2), (0, 1, 2, len(chain.layers)), 2, 1)
    updates = shared_updates(two_moments(chain), chain, 3)
    grown = []
    for on_disk in ((), ("moments",)):
        use = disk_use(chain, layout, states_of_two_moments(chain), on_disk)
        models = [
            MemoryModel(chain, analysis.costs, 2, updates, use, devices) for devices in (1, 2, 3)
        ]
        one, two, three = (model.host_bytes(shape) for model in models)
        assert len({model.state_bytes for model in models}) == 1
        grown += [two - one, three - two]
    # Each of two micro-batches, and what the second segment reads of it, waits for backward.
    waiting = (*chain.inputs, chain.layers[1].reads[0])
    waiting_bytes = sum(analysis.costs.values[name].n_bytes for name in waiting)
    assert set(grown) == {2 * waiting_bytes}


def with_disk(tiny: Subject, bytes_per_s: float, host_memory_bytes: int = GIB) -> Prospect:
    """Return what two devices would do with moments on a disk of such a rate."""
    card = gpu("rtx-3090")
    machine = dataclasses.replace(
        machine_for(card, host_memory_bytes),
        storage_read_bytes_per_s=bytes_per_s,
        storage_write_bytes_per_s=bytes_per_s,
    )
    workload = Workload(
        context_tokens=64, micro_batch=1, devices=2, disk=True, on_disk="moments", clips=True
    )
    return forecaster(tiny)(Setting(machine=machine, workload=workload, card=card))


def test_further_gradients_count_once_where_a_disk_asks_for_more_tokens(tiny: Subject) -> None:
    fast, slow = with_disk(tiny, 1e12), with_disk(tiny, 1e8)
    assert slow.tokens_per_step > fast.tokens_per_step
    # The plan for more tokens is that for so many tokens from the start.
    workload = Workload(
        context_tokens=64,
        micro_batch=1,
        tokens_per_step=slow.tokens_per_step,
        devices=2,
        disk=True,
        on_disk="moments",
        clips=True,
    )
    setting = Setting(machine=slow.machine, workload=workload, card=gpu("rtx-3090"))
    again = forecaster(tiny)(setting)
    assert again.plan == slow.plan
    assert again.analysis.updates is not None
    assert slow.analysis.updates is not None
    assert again.analysis.updates.scratch_bytes == slow.analysis.updates.scratch_bytes


def test_host_memory_that_several_devices_do_not_fit(tiny: Subject) -> None:
    free = with_disk(tiny, 1e12)
    needed = free.plan.host_bytes
    assert with_disk(tiny, 1e12, needed).plan.host_bytes == needed
    fewer = with_disk(tiny, 1e12, needed - 1)  # micro-batches, which lie there, too
    assert fewer.plan.host_bytes < needed
    assert fewer.tokens_per_step < free.tokens_per_step
    with pytest.raises(PlanError, match=r"on 2 devices takes .* or fewer devices"):
        with_disk(tiny, 1e12, needed // 2)


def test_each_device_loads_parameters_from_the_disk_by_itself() -> None:
    """Through pieces of its own, at its part of the disk's rate."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(32)))
    example = torch.randn(2, 64)
    traced = chain_of(model, example, torch.sum)
    chain, costs = traced.chain, layer_costs(traced.chain, traced.bind(example))
    times = {cost.kind: LayerTime(1e-3, 3e-3) for cost in costs.layers}
    states = states_of_two_moments(chain)

    def planned(
        devices: int, host_memory_bytes: int, on_disk: OnDisk | None = None, rate: float = 1e9
    ) -> Plan:
        machine = dataclasses.replace(
            machine_for("rtx-3090", host_memory_bytes),
            storage_read_bytes_per_s=rate,
            storage_write_bytes_per_s=1e9,
        )
        request = Request(
            micro_batches=1,
            updates=shared_updates(two_moments(chain), chain, devices),
            disk=DiskRequest(states=states, on_disk=on_disk),
            devices=devices,
        )
        return make_plan(chain, costs, times, machine, request)

    for devices in (1, 2):
        least = planned(devices, GIB, ("moments",)).host_bytes
        assert planned(devices, least).on_disk == ("moments",)
        assert planned(devices, least - 1).on_disk == KINDS
    one, two = (disk_use(chain, Layout(chain), states, KINDS, devices) for devices in (1, 2))
    assert two.staging_bytes - one.staging_bytes == LOAD_PIECES * one.load_piece_bytes > 0
    alone, both = (planned(devices, GIB, KINDS, rate=1e6).step_s for devices in (1, 2))
    assert both > alone


def test_atom_plan_puts_parameters_on_disk_for_several_devices(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["plan", "tiny", "--gpu", "rtx-3090", "--disk", "nvme-pcie4", "--devices", "2"]
    given += ["--context", "64", "--micro-batch", "1"]
    assert main([*given, "--on-disk", "parameters"]) == 0
    assert "moments, masters, parameters" in capsys.readouterr().out
    assert main([*given, "--host-memory", "1MiB"]) == 2
    said = capsys.readouterr().err
    assert "with everything on disk that can be" in said
    assert "raise --host-memory to at least" in said


def plan(capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    given = ["plan", "tiny", "--gpu", "rtx-3090", "--context", "64", "--micro-batch", "4"]
    assert main([*given, *more, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_atom_plan_devices(capsys: pytest.CaptureFixture[str]) -> None:
    tokens = ["--tokens-per-step", str(8 * 4 * 64)]
    one, two = plan(capsys, *tokens), plan(capsys, *tokens, "--devices", "2")
    assert one["devices"] == 1
    assert two["devices"] == 2
    assert two["plan"]["micro_batches"] == one["plan"]["micro_batches"] // 2
    assert two["tokens_per_step"] == one["tokens_per_step"]
    assert two["plan"]["host_bytes"] > one["plan"]["host_bytes"]
    assert two["peak_flops_per_s"] == 2 * one["peak_flops_per_s"]
    assert two["plan"]["device_blocks"] == []
    given = ["plan", "tiny", "--gpu", "rtx-3090", "--context", "64", "--devices", "2"]
    assert main(given) == 0
    shown = capsys.readouterr().out
    assert "2 x " in shown
    assert "on each of 2 devices" in shown


def test_steps_that_devices_cannot_divide() -> None:
    with pytest.raises(ConfigError, match=r"divided equally among 3 devices; .* 3072 tokens"):
        Workload(context_tokens=512, tokens_per_step=4 * 512, micro_batch=2, devices=3)
    with pytest.raises(ConfigError, match="devices must be at least 1"):
        Workload(context_tokens=512, devices=0)
