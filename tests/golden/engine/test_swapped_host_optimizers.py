"""Swapped training with ATOM's own optimizers equals resident training bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import atomtrain
from atomtrain.checkpoint import load_latest, save
from atomtrain.errors import StreamError
from atomtrain.optimizers import SGD, AdamW, Muon, Schedule, decay_groups, muon_groups
from atomtrain.optimizers import moments as moments_module
from atomtrain.training.setup.state import restore, shards_of
from tests.support.reference import assert_equal_training, train, twin
from tests.support.swapped import gpt, token_batches

pytestmark = pytest.mark.usefixtures("assumed_times")
STEPS = 4
FACTORIES: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "float32": lambda model: AdamW(decay_groups(model), lr=1e-3),
    "bfloat16": lambda model: AdamW(decay_groups(model), lr=1e-3, state="bfloat16", seed=9),
    "int8": lambda model: AdamW(decay_groups(model), lr=1e-3, state="int8", seed=9),
    "muon": lambda model: Muon(muon_groups(model), lr=1e-3),
    "muon-int8": lambda model: Muon(muon_groups(model), lr=1e-3, state="int8"),
    "sgd": lambda model: SGD(decay_groups(model), lr=1e-2),
    "sgd-momentum": lambda model: SGD(decay_groups(model), lr=1e-2, momentum=0.9, nesterov=True),
}


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several slices a parameter, the last of them not full."""
    torch.manual_seed(1234)
    monkeypatch.setattr(moments_module, "SLICE", 1024)


def swap(model: nn.Module, example: Any, factory: Any, **options: Any) -> atomtrain.Engine:
    return atomtrain.swap(
        model,
        example,
        optimizer=lambda _: factory(model),
        device="emulated:1GiB/s",
        device_memory="64MiB",
        options=atomtrain.Options(optimizer_on_device=False, **options),
    )


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_every_bit_is_equal(name: str, segments: int, clip_norm: float | None) -> None:
    factory, steps = FACTORIES[name], token_batches(2, STEPS)
    model = gpt(tied=False)
    reference = twin(model)
    resident = factory(reference)
    expected = train(reference, steps, resident, clip_norm=clip_norm)
    options = {"micro_batches": 2, "segments": segments, "clip_norm": clip_norm}
    with swap(model, steps[0][0], factory, **options) as engine:
        assert [engine.step(micro_batches) for micro_batches in steps] == expected
        assert_equal_training(engine, reference, resident)


@pytest.mark.parametrize("name", FACTORIES)
def test_a_shared_weight_and_a_schedule(name: str) -> None:
    factory, steps = FACTORIES[name], token_batches(1, STEPS)
    schedule = Schedule(steps=STEPS, warmup_steps=2)
    model = gpt(tied=True)
    reference = twin(model)
    resident = factory(reference)
    scheduler = LambdaLR(resident, schedule)
    expected = []
    for step in steps:
        expected += train(reference, [step], resident)
        scheduler.step()
    with swap(model, steps[0][0], factory, segments=2) as engine:
        scheduler = LambdaLR(engine.optimizer, schedule)
        losses = []
        for step in steps:
            losses.append(engine.step(step))
            scheduler.step()
        assert losses == expected
        assert_equal_training(engine, reference, resident)


@pytest.mark.parametrize("name", FACTORIES)
def test_a_checkpoint_brings_every_format_back(name: str, tmp_path: Path) -> None:
    factory, steps = FACTORIES[name], token_batches(1, STEPS)
    with swap(gpt(tied=True), steps[0][0], factory) as engine:
        for step in steps[:2]:
            engine.step(step)
        save(tmp_path, 2, shards_of(engine), {})
        expected = [engine.step(step) for step in steps[2:]]
        end = {key: value.clone() for key, value in engine.state_dict().items()}
    with swap(gpt(tied=True), steps[0][0], factory) as engine:
        restore(engine, load_latest(tmp_path))
        assert [engine.step(step) for step in steps[2:]] == expected
        for key, value in engine.state_dict().items():
            assert torch.equal(value, end[key])


def test_the_engine_refuses_a_state_of_another_format() -> None:
    step = token_batches(1, STEPS)[0]
    with swap(gpt(tied=True), step[0], FACTORIES["int8"]) as engine:
        engine.step(step)
        saved = engine.optimizer_state()
    with swap(gpt(tied=True), step[0], FACTORIES["bfloat16"]) as engine:
        engine.load_optimizer_state(saved)
        engine.step(step)
        with pytest.raises(StreamError, match="continue with the state= that it was saved with"):
            engine.synchronize()
