"""The catalogue: every figure has a source, names are forgiving, estimates follow the roofline."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from atomtrain.analysis import chain_of, layer_costs
from atomtrain.errors import ConfigError, PlanError
from atomtrain.models import GPT, preset
from atomtrain.planning.catalogue import (
    GPUS,
    HOSTS,
    MATMUL_SHARE,
    estimate_times,
    gpu,
    host,
    host_for,
    machine_for,
    pcie_bytes_per_s,
)
from tests.support import ROOT

GIB = 1 << 30


@pytest.fixture(scope="module")
def costs():
    with torch.device("meta"):
        model = GPT(preset("gpt3-small"))
    tokens = torch.zeros(1, 2048, dtype=torch.long, device="meta")
    example = {"input_ids": tokens, "labels": tokens}
    traced = chain_of(model, example)
    return layer_costs(traced.chain, traced.bind(example))


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_is_plausible_and_has_sources(name: str) -> None:
    card = GPUS[name]
    assert card.name == name
    assert card.sources
    for source in card.sources:
        assert source.url.startswith("https://")
        assert 2012 <= source.year <= 2026
        assert source.title
    assert 8 * GIB <= card.memory_bytes <= 192 * GIB
    assert 2e11 < card.memory_bytes_per_s < 1e13
    assert card.pcie_generation in (3, 4, 5)
    assert card.pcie_lanes in (8, 16)
    assert card.host in HOSTS
    assert set(card.flops_per_s) <= set(MATMUL_SHARE)
    assert card.flops_per_s["fp32"] > 1e13
    # Half precision is never slower than what it is meant to speed up.
    assert all(value >= card.flops_per_s["fp32"] for value in card.flops_per_s.values())


@pytest.mark.parametrize("name", HOSTS)
def test_host_memory_is_named_after_what_it_is(name: str) -> None:
    kind, rate, channels = name.split("-")
    entry = host(name)
    assert entry.memory_bytes_per_s == 8e6 * int(rate) * int(channels.removesuffix("ch"))
    assert kind.upper() in entry.source.title


def test_the_usual_names_are_there_whatever_their_case() -> None:
    for name in ("RTX-3090", "rtx-4090", "v100", "a100-80gb", "H100", "h200", "rtx-4060-laptop"):
        assert gpu(name).name == name.lower()


def test_an_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no GPU 'rtx3090'.* Did you mean 'rtx-3090'\?"):
        gpu("rtx3090")
    with pytest.raises(ConfigError, match=r"Did you mean 'ddr5-4800-8ch'\?"):
        host("ddr5-4800-8chan")


def test_a_data_type_without_units_is_named_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="GTX 1080 Ti has no units for 'bf16'; it has fp32"):
        gpu("gtx-1080-ti").peak_flops_per_s("bf16")


@pytest.mark.parametrize(("generation", "measured_gb_per_s"), [(3, 12.3), (4, 25.1), (5, 52.8)])
def test_pinned_copies_come_near_published_measurements(
    generation: int, measured_gb_per_s: float
) -> None:
    assert pcie_bytes_per_s(generation, 16) == pytest.approx(1e9 * measured_gb_per_s, rel=0.06)
    assert pcie_bytes_per_s(generation, 8) == pcie_bytes_per_s(generation, 16) / 2


@pytest.mark.parametrize(("generation", "lanes"), [(2, 16), (9, 16), (4, 0), (4, 12), (4, -16)])
def test_links_that_do_not_exist(generation: int, lanes: int) -> None:
    with pytest.raises(ConfigError, match="PCIe"):
        pcie_bytes_per_s(generation, lanes)


def test_a_machine_from_the_catalogue() -> None:
    machine = machine_for("rtx-3090", 128 * GIB)
    assert machine.name == "GeForce RTX 3090, PCIe 4 x16, ddr4-3200-2ch"
    assert machine.host_memory_bytes == 128 * GIB
    assert machine.device_memory_bytes == int(0.9 * 24 * GIB)
    assert machine.load_bytes_per_s == pcie_bytes_per_s(4, 16)
    # AdamW moves 28 bytes a parameter; such a desktop updates more than a billion a second.
    assert 1e9 < machine.update_parameters_per_s < 2e9
    assert machine.load_pageable_bytes_per_s is not None
    assert machine.load_pageable_bytes_per_s < machine.load_bytes_per_s


def test_a_given_budget_counts() -> None:
    machine = machine_for("rtx-4090", 64 * GIB, device_memory_bytes=GIB)
    assert machine.device_memory_bytes == GIB
    whole = machine_for("rtx-4090", 64 * GIB, device_memory_bytes=24 * GIB)
    assert whole.device_memory_bytes == 24 * GIB
    with pytest.raises(ConfigError, match=r"is more than GeForce RTX 4090 has, 24\.0 GiB"):
        machine_for("rtx-4090", 64 * GIB, device_memory_bytes=24 * GIB + 1)


def test_more_host_memory_than_a_desktop_holds_means_a_server() -> None:
    card = gpu("rtx-3090")
    assert host_for(card, 64 * GIB).name == "ddr4-3200-2ch"
    server = host_for(card, 3000 * GIB)
    assert server.most_memory_bytes >= 3000 * GIB
    assert server.memory_bytes_per_s > host(card.host).memory_bytes_per_s


def test_memory_of_nothing_is_refused() -> None:
    with pytest.raises(PlanError, match="host_memory_bytes"):
        machine_for("h100", 0)
    with pytest.raises(PlanError, match="device_memory_bytes"):
        machine_for("h100", GIB, device_memory_bytes=0)


def test_estimates_follow_the_roofline(costs) -> None:
    times = estimate_times(costs, "rtx-3090")
    assert set(times) == {cost.kind for cost in costs.layers}
    for cost in costs.layers:
        time = times[cost.kind]
        assert 0 < time.forward_s < time.backward_s < 10
        least_s = cost.forward_flops / gpu("rtx-3090").flops_per_s["fp32"]
        assert math.isfinite(time.forward_s)
        assert time.forward_s >= least_s
    block = next(cost for cost in costs.layers if cost.name == "blocks.0")
    # A block's arithmetic outweighs its traffic; recomputing and backward take about three times
    # as long as forward.
    assert times[block.kind].backward_s == pytest.approx(3 * times[block.kind].forward_s, rel=0.2)


def test_faster_cards_and_shorter_types_are_never_slower(costs) -> None:
    slow = estimate_times(costs, "rtx-3090")
    for faster in (estimate_times(costs, "h100"), estimate_times(costs, "rtx-3090", "bf16")):
        for kind, time in faster.items():
            assert time.forward_s <= slow[kind].forward_s
            assert time.backward_s <= slow[kind].backward_s


def test_estimates_of_unknown_things_are_refused(costs) -> None:
    with pytest.raises(ConfigError, match="no GPU"):
        estimate_times(costs, "voodoo2")
    with pytest.raises(ConfigError, match="no units for 'fp12'"):
        estimate_times(costs, "h100", "fp12")


def test_the_page_shows_the_catalogue_as_it_is() -> None:
    page = (ROOT / "docs/hardware.md").read_text(encoding="utf-8")
    for name in (*GPUS, *HOSTS):
        assert f"`{name}`" in page


def test_the_native_precision_is_the_one_with_the_highest_peak() -> None:
    """Where two have the same, bfloat16: its loss needs no scale."""
    found = {name: card.native_precision for name, card in GPUS.items()}
    assert {name for name, precision in found.items() if precision != "bf16"} == {
        "gtx-1080-ti", "v100",
    }  # fmt: skip
    assert (found["gtx-1080-ti"], found["v100"]) == ("fp32", "fp16")
    slow = dataclasses.replace(GPUS["h100"], flops_per_s={"fp32": 2.0, "fp16": 1.0, "bf16": 2.0})
    assert slow.native_precision == "fp32"
