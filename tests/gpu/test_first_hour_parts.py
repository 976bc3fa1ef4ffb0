"""Parts of `scripts/first-hour` on a GPU in software: what a real one will run first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from atombench.first_hour import parts, trials
from atombench.first_hour.sizes import SIZES, PartOrder
from atomtrain.analysis.costs.costs import layer_costs
from tests.support.software_gpu import installed

pytestmark = [
    pytest.mark.skipif(
        torch.backends.cuda.is_built(), reason="a real torch.cuda is not to be replaced"
    ),
    pytest.mark.usefixtures("assumed_times"),
]
MEMORY = "112MiB"
"""Libraries keep 72 MiB of it."""


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PartOrder]:
    for module in ("atomtrain.engine.api", "atomtrain.views.plans.subject"):
        # torch's fake tensors are on a GPU only where it has CUDA.
        monkeypatch.setattr(
            f"{module}.layer_costs",
            lambda chain, inputs, *_, **named: layer_costs(chain, inputs, "cpu", **named),
        )
    small = SIZES["small"]
    size = dataclasses.replace(
        small,
        model_memory=MEMORY,
        timeline=dataclasses.replace(small.timeline, device_memory=MEMORY),
        large=dataclasses.replace(small.large, device_memory=MEMORY),
    )
    with installed(count=1) as made:
        # It has no gaps between blocks.
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", torch.cuda.max_memory_allocated)
        yield PartOrder("cuda", size, tmp_path / "part.json")
    assert made.reports == []


def test_peaks_are_as_predicted_and_runs_alike(
    order: PartOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "_llama", trials._gpt)  # exporting needs what is not emulated
    found = trials.memory(order)["models"]
    for model in found.values():
        assert model["same_bits"] is True
        most = model["predicted_peak_bytes"] + model["library_bytes"]
        assert 0 < model["allocated_peak_bytes"] <= most <= model["budget_bytes"]
        assert model["allocation_retries"] == 0
        assert model["reserved_peak_bytes"] >= model["allocated_peak_bytes"]


def test_the_large_model_keeps_what_it_finds(order: PartOrder) -> None:
    found = parts.seven_billion(order)
    assert found["steps"] == 1
    assert found["device_peak_bytes"] <= found["device_budget_bytes"] == 112 << 20
    assert order.out.exists()
