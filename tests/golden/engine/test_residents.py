"""Resident blocks: bits, and what comes when."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from atomtrain.engine.execution.slots import Slots
from atomtrain.engine.state.residents import Copy
from atomtrain.planning import Shape
from atomtrain.planning.cost.costing import Costing, Steps
from atomtrain.planning.plan.layout import Layout
from atomtrain.planning.plan.shape import evaluation_visits, training_visits
from atomtrain.planning.search.space import Residency, Space
from tests.golden.engine.test_disk import FACTORIES
from tests.golden.engine.test_disk import gpt as disk_gpt
from tests.golden.engine.test_disk import swap as swap_on_disk
from tests.support.planning_models import use_shape
from tests.support.reference import assert_equal_training, train, twin
from tests.support.swapped import DEEP_LAYERS as LAYERS
from tests.support.swapped import adamw, deep_gpt, random_delays, swap, token_batches

pytestmark = pytest.mark.usefixtures("assumed_times")
HEAD = LAYERS - 1
"""Blocks: the last layer, and a weight that it shares with the first one."""
SHAPES = [
    Shape((0, 1, 3), (0, 2, 3, 5), 2, 2, resident_blocks=(HEAD,)),
    Shape((0, 2, 4), (0, 2, 4, 5), 1, 1, "host", (2, HEAD),
          activations=("offload", "keep", "recompute")),
    Shape((0,), (0, 5), 1, 1, resident_blocks=(0, HEAD)),
    Shape((1, 2), (1, 2, 5), 2, 1, "device", (HEAD,), 1),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(4321)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("micro_batches", "clip_norm"), [(1, None), (3, None), (3, 0.5)])
def test_resident_blocks_train_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, shape: Shape, micro_batches: int, clip_norm: float | None
) -> None:
    use_shape(monkeypatch, shape)
    # Layers on the host draw no random numbers.
    dropout = 0.0 if shape.host_layers else 0.2
    model, steps = deep_gpt(dropout, tied=False), token_batches(micro_batches, steps=3)
    reference = twin(model)
    resident = adamw(reference.parameters())
    state = torch.get_rng_state()
    expected = train(reference, steps, resident, clip_norm=clip_norm)
    torch.set_rng_state(state)
    options = {"micro_batches": micro_batches, "clip_norm": clip_norm}
    with swap(model, steps[0][0], inject=random_delays(7), **options) as engine:
        losses = []
        for step in steps:
            losses.append(engine.step(step))
            engine.evaluate(step)  # a pass between steps brings them too
        assert losses == expected
        assert_equal_training(engine, reference, resident)
        assert engine.device.peak_bytes() <= engine.plan.device_peak_bytes


def test_resident_blocks_come_from_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    layers = 6
    monkeypatch.setattr(Space, "residencies", (Residency((layers - 1,), ()),))
    model, steps = disk_gpt(), [batches * 2 for batches in token_batches(1, steps=3)]
    reference = twin(model)
    factory = FACTORIES["float32"]
    resident = factory(reference)
    expected = train(reference, steps, resident)
    options = {"micro_batches": 2, "on_disk": "parameters", "host_layers": 0, "segments": 3}
    with swap_on_disk(model, steps[0][0], factory, tmp_path, **options) as engine:
        assert engine.plan.resident_blocks == (layers - 1,)
        assert [engine.step(step) for step in steps] == expected
        assert_equal_training(engine, reference, resident)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("training", [True, False])
def test_each_load_brings_the_bytes_that_were_predicted(
    monkeypatch: pytest.MonkeyPatch, shape: Shape, training: bool
) -> None:
    use_shape(monkeypatch, shape)
    loads: list[list[Copy]] = []

    def noted(slots: Slots, copies: list[Copy]) -> object:
        loads.append(copies)
        return copying(slots, copies)

    copying = Slots._in
    monkeypatch.setattr(Slots, "_in", noted)
    model, (step,) = deep_gpt(0.0, tied=False), token_batches(2, steps=1)
    with swap(model, step[0], micro_batches=2) as engine:
        (engine.step if training else engine.evaluate)(step)
        planner = engine.planner
        machine = dataclasses.replace(planner.machine, load_bytes_per_s=1.0, both_ways_share=1.0)
        given = dataclasses.replace(planner.given, machine=machine)
        layout = Layout(planner.chain)
        steps = Steps(micro_batches=2, host_layers=shape.host_layers)
        costing = Costing(given, steps)
        visits = (training_visits if training else evaluation_visits)(shape)
        expected = [
            time.load_s
            for visit, time in zip(visits, costing.visit_times(shape, visits), strict=True)
            if visit.load
        ]
        assert [sum(copy.source.numel() for copy in copies) for copies in loads] == expected
        for block in shape.resident_blocks:  # once in a pass
            start, stop = layout.block_range(block)
            pieces = sorted(
                (int(copy.source.storage_offset()), copy.source.numel())
                for copies in loads
                for copy in copies
                if start <= copy.source.storage_offset() < stop
            )
            for at, n_bytes in pieces:
                assert at == start
                start += n_bytes
            assert start == stop
