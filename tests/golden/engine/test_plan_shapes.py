"""Whatever the shape of the plan, swapped training equals resident training bit for bit.

Shapes are random: forward and backward partitions that differ, resident blocks (shared weights
too), kept graphs, one to three slots, values on the device or on the host, delays in all streams.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from atomtrain.planning import Shape
from tests.support.planning_models import random_shape, use_shape
from tests.support.reference import HeadFirst, assert_equal_training, train, twin
from tests.support.swapped import DEEP_LAYERS as LAYERS
from tests.support.swapped import (
    TIED,
    Skips,
    adamw,
    check,
    deep_gpt,
    pairs,
    random_delays,
    regression,
    sequential_loss,
    swap,
    token_batches,
)

pytestmark = pytest.mark.usefixtures("assumed_times")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(4321)


def options_of(source: random.Random) -> dict[str, Any]:
    return {
        "clip_norm": source.choice([None, 0.5]),
        "inject": random_delays(source.randint(0, 99)) if source.random() < 0.5 else None,
    }


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_untied_gpt(monkeypatch: pytest.MonkeyPatch, seed: int, micro_batches: int) -> None:
    source = random.Random(seed)
    use_shape(monkeypatch, random_shape(source, LAYERS, LAYERS))
    steps = token_batches(micro_batches, steps=2)
    check(deep_gpt(source.choice([0.0, 0.3]), tied=False), steps, **options_of(source))


@pytest.mark.parametrize("seed", range(6))
def test_tied_gpt(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    source = random.Random(seed)
    use_shape(monkeypatch, random_shape(source, LAYERS, LAYERS + 1))
    check(deep_gpt(source.choice([0.0, 0.3]), True), token_batches(1, 2), **options_of(source))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("resident", [(), (TIED,), (0, TIED)])
def test_tied_gpt_adds_the_heads_gradients_first(
    monkeypatch: pytest.MonkeyPatch, seed: int, resident: tuple[int, ...]
) -> None:
    source = random.Random(seed)
    shape = random_shape(source, LAYERS, LAYERS + 1, resident=resident)
    if shape.segments == 1:
        shape = Shape((0, 2), (0, 2, LAYERS), 2, 1, resident_blocks=resident)
    use_shape(monkeypatch, shape)
    model, steps = deep_gpt(0.2, tied=True), token_batches(7, steps=2)
    head_first = HeadFirst(twin(model))
    sgd = torch.optim.SGD(
        [p for p in head_first.parameters() if p is not head_first.alias], lr=0.1, momentum=0.9
    )
    state = torch.get_rng_state()
    expected = [head_first.step(micro_batches, sgd) for micro_batches in steps]
    torch.set_rng_state(state)
    with swap(
        model, steps[0][0], lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), micro_batches=7
    ) as engine:
        assert [engine.step(micro_batches) for micro_batches in steps] == expected
        assert engine.device.peak_bytes() <= engine.plan.device_peak_bytes
        weights = head_first.gpt.state_dict()
        for name, value in engine.state_dict().items():
            assert torch.equal(value, weights[name]), name


@pytest.mark.parametrize("seed", range(6))
def test_running_statistics_and_dropout(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    source = random.Random(seed)
    use_shape(monkeypatch, random_shape(source, 6, 6))
    model = nn.Sequential(
        nn.Linear(5, 6), nn.Dropout(0.5), nn.BatchNorm1d(6), nn.GELU(), nn.BatchNorm1d(6),
        nn.Linear(6, 3),
    )  # fmt: skip
    steps, example = [pairs([4, 6, 5], 5) for _ in range(2)], pairs([6], 5)[0]
    check(model, steps, loss_of=sequential_loss, loss=regression, example=example)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_skips(monkeypatch: pytest.MonkeyPatch, seed: int, micro_batches: int) -> None:
    source = random.Random(seed)
    use_shape(monkeypatch, random_shape(source, 5, 5))
    steps = [
        [{"x": torch.randn(4, 6), "side": torch.randn(4, 6)} for _ in range(micro_batches)]
        for _ in range(2)
    ]
    check(Skips(), steps, loss_of=lambda model, batch: model(**batch), **options_of(source))


def test_evaluation_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape((0, 1, 3), (0, 2, 3, 5), 2, 1, resident_blocks=(0, 4))
    use_shape(monkeypatch, shape)
    model, steps = deep_gpt(0.1, tied=False), token_batches(2, steps=3)
    reference = twin(model)
    resident = adamw(reference.parameters())
    with swap(model, steps[0][0], micro_batches=2) as engine:
        for step in steps:
            state = torch.get_rng_state()
            train(reference, [step], resident)
            torch.set_rng_state(state)
            engine.step(step)
            reference.eval()
            with torch.no_grad():
                expected = sum(float(reference(**batch).loss) for batch in step) / 2
            reference.train()
            assert engine.evaluate(step) == expected
        assert_equal_training(engine, reference, resident)


def test_all_resident_and_kept_moves_everything_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With memory for all, a step loads each parameter once and recomputes nothing."""
    shape = Shape(
        (0, 3), (0, 3, 5), 2, 1, resident_blocks=tuple(range(5)),
        activations=("keep", "recompute"),
    )  # fmt: skip
    use_shape(monkeypatch, shape)
    jobs: list[str] = []
    steps = token_batches(2, steps=1)
    check(deep_gpt(0.0, tied=False), steps, inject=jobs.append)
    assert jobs.count("load") == 2
    assert jobs.count("unload") == 2
