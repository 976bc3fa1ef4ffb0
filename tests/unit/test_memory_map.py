"""The memory map adds up to what the plan says, whatever its shape."""

from __future__ import annotations

import random

import pytest
from engine_models import gpt, swap, tokens
from planning_models import random_shape, use_shape

pytestmark = pytest.mark.usefixtures("assumed_times")


@pytest.mark.parametrize("seed", range(6))
def test_regions_add_up_to_the_plan(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    source = random.Random(seed)
    layers, width = 4, 16
    model, example = gpt(layers, width, 0.0), tokens(2, 9)
    with swap(model, example, micro_batches=2) as engine:
        blocks = len(engine.layers())
    use_shape(monkeypatch, random_shape(source, blocks, blocks + 1, keep=seed % 2 == 0))
    model = gpt(layers, width, 0.0)
    with swap(model, example, micro_batches=2) as engine:
        plan, regions = engine.plan, engine.memory_map()
        state_bytes = engine.state_bytes
    assert all(region.bytes >= 0 for region in regions)
    total = {
        place: sum(region.bytes for region in regions if region.place == place)
        for place in ("host", "device")
    }
    assert total["device"] == max(plan.device_memory_bytes, plan.device_peak_bytes)
    assert abs(total["host"] - plan.host_bytes) < len(regions), "shares are rounded down"
    held = sum(region.bytes for region in regions if region.place == "host")
    waiting = sum(region.bytes for region in regions if region.kind == "waiting")
    assert abs(held - waiting - state_bytes) < len(regions)
    labels = [r.label for r in regions if r.kind == "parameters" and r.label.startswith("segment")]
    assert len(labels) == plan.segments
