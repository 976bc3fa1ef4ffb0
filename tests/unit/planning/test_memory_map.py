"""The memory map adds up to what the plan says, whatever its shape."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.engine_models import gpt, swap, tokens
from tests.support.planning_models import random_shape, use_shape

pytestmark = pytest.mark.usefixtures("assumed_times")


@pytest.mark.parametrize("seed", range(6))
def test_regions_add_up_to_the_plan(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    source = random.Random(seed)
    layers, width = 4, 16
    model, example = gpt(layers, width, 0.0), tokens(2, 9)
    with swap(model, example, micro_batches=2) as engine:
        blocks = len(engine.layers())
    use_shape(monkeypatch, random_shape(source, blocks, blocks + 1, mixed=seed % 2 == 0))
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["moments", "parameters"])
def test_what_is_on_disk_is_not_on_the_host(tmp_path: Path, kind: str) -> None:
    model, example = gpt(4, 16, 0.0), tokens(2, 9)
    with swap(model, example, micro_batches=2, disk=tmp_path, on_disk=kind) as engine:
        plan, regions = engine.plan, engine.memory_map()
    total = {place: 0 for place in ("host", "disk", "device")}
    for region in regions:
        total[region.place] += region.bytes
    assert plan.disk_bytes > 0
    assert abs(total["disk"] - plan.disk_bytes) < len(regions)
    assert abs(total["host"] - plan.host_bytes) < len(regions)
    stored = {region.kind for region in regions if region.place == "disk"}
    assert ("parameters" in stored) == (kind == "parameters")
