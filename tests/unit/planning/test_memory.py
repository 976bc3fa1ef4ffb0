"""Device memory: predicted before, measured after, flat in depth, and never above the budget."""

from __future__ import annotations

import random
import re

import pytest
import torch
from torch import Tensor, nn

import atomtrain
from atomtrain.errors import PlanError
from atomtrain.planning.cost.memory import process_bytes
from tests.support.engine_models import gpt, square, swap, tokens
from tests.support.planning_models import memory_of, random_shape, use_shape

pytestmark = pytest.mark.usefixtures("assumed_times")
CASES = [
    # layers, width, sequences, length, micro-batches, segments, slots, dropout
    (1, 8, 1, 4, 1, 1, None, 0.0),
    (2, 24, 3, 17, 1, 2, None, 0.0),
    (3, 40, 2, 32, 4, 3, 2, 0.0),
    (4, 16, 5, 9, 7, 6, 3, 0.1),
    (5, 32, 1, 31, 2, 4, 1, 0.2),
    (6, 64, 4, 32, 3, 2, None, 0.0),
    (6, 12, 16, 32, 2, 8, 2, 0.0),
]


def peak_of_a_step(engine: atomtrain.Engine, micro_batches: int, example: object) -> int:
    engine.step([example] * micro_batches)  # type: ignore[list-item]
    assert engine.last is not None
    return engine.last.device_peak_bytes


@pytest.mark.parametrize(
    ("layers", "width", "sequences", "length", "micro_batches", "segments", "slots", "dropout"),
    CASES,
)
@pytest.mark.parametrize("boundary", ["device", "host"])
def test_the_prediction_is_never_below_the_measured_peak_and_close_to_it(
    monkeypatch: pytest.MonkeyPatch,
    layers: int,
    width: int,
    sequences: int,
    length: int,
    micro_batches: int,
    segments: int,
    slots: int | None,
    dropout: float,
    boundary: str,
) -> None:
    monkeypatch.setattr("atomtrain.planning.search.space._BOUNDARIES", (boundary,))
    model, example = gpt(layers, width, dropout), tokens(sequences, length)
    with swap(
        model, example, micro_batches=micro_batches, segments=segments, slots=slots
    ) as engine:
        assert engine.plan.boundary == boundary
        measured = peak_of_a_step(engine, micro_batches, example)
        assert measured <= engine.plan.device_peak_bytes
        assert measured >= 0.9 * engine.plan.device_peak_bytes


@pytest.mark.parametrize("seed", range(20))
def test_random_shapes_of_plans_need_what_was_predicted(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    source = random.Random(seed)
    layers, micro_batches = source.randint(1, 5), source.randint(1, 4)
    shape = random_shape(source, layers + 2, layers + 3)
    use_shape(monkeypatch, shape)
    model = gpt(layers, 8 * source.randint(2, 6), source.choice([0.0, 0.1]))
    example = tokens(source.randint(1, 6), source.randint(4, 32))
    with swap(model, example, micro_batches=micro_batches) as engine:
        assert engine.plan.shape == shape
        engine.step([example] * micro_batches)
        measured = peak_of_a_step(engine, micro_batches, example)
        assert measured <= engine.plan.device_peak_bytes
        # The scratch of updates on the device counts at every visit.
        least = 0.9 if shape.device_blocks else 0.95
        assert measured >= least * engine.plan.device_peak_bytes
        engine.synchronize()
        host = host_bytes_of(engine) + (micro_batches + 1) * sum(t.nbytes for t in example.values())
        sent = memory_of(engine.planner, micro_batches, shape).sent_storages(shape)
        process = process_bytes(len(engine.planner.chain.layers), sent)
        predicted = engine.plan.host_bytes - process
        assert host <= predicted
        assert host >= 0.95 * predicted


def host_bytes_of(engine: atomtrain.Engine) -> int:
    """Return what the engine really holds on the host."""
    states = engine.optimizer_state().values()
    moments = {id(t): t.nbytes for state in states for t in state.values() if t.dim()}
    store = engine._core.store
    arenas = store.parameters.nbytes + store.gradients.nbytes
    return arenas + sum(moments.values()) + engine._core.executor.pool.total_bytes


class Turned(nn.Module):
    """Returns a view that is not contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x).t()


class Wide(nn.Module):
    """Needs `factor` times its input while it runs; nothing of that shows in its shapes."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x.repeat(1, self.factor).exp().view(*x.shape, self.factor).mean(-1)


@pytest.mark.parametrize("segments", [1, 3, 7])
@pytest.mark.parametrize("boundary", ["device", "host"])
def test_layers_of_other_kinds_stay_within_the_prediction(
    monkeypatch: pytest.MonkeyPatch, segments: int, boundary: str
) -> None:
    monkeypatch.setattr("atomtrain.planning.search.space._BOUNDARIES", (boundary,))
    model = nn.Sequential(
        nn.Linear(20, 20), Turned(), nn.Linear(20, 20), Wide(2), nn.BatchNorm1d(20), Wide(9),
        nn.Linear(20, 20),
    )  # fmt: skip
    example = torch.randn(20, 20)
    with swap(model, example, loss=square, micro_batches=3, segments=segments) as engine:
        measured = peak_of_a_step(engine, 3, example)
        assert measured <= engine.plan.device_peak_bytes
        engine.evaluate([example] * 5)
        assert engine.device.peak_bytes() <= engine.plan.device_peak_bytes


@pytest.mark.slow
def test_the_peak_does_not_grow_with_depth() -> None:
    example = tokens(4, 16)
    peaks, budget = {}, 0
    for layers in (8, 32):
        if not budget:
            budget = _recommended(gpt(layers, 24), example, micro_batches=2)
        with swap(gpt(layers, 24), example, memory=budget, micro_batches=2) as engine:
            peaks[layers] = peak_of_a_step(engine, 2, example)
            assert engine.plan.segments > layers / 2
    assert peaks[32] <= peaks[8] * 1.02
    assert peaks[32] <= budget


def _recommended(model: nn.Module, example: object, **options: int) -> int:
    """Return the budget that the planner's error message recommends, in bytes."""
    with pytest.raises(PlanError) as caught:
        swap(model, example, memory=1, **options)
    found = re.search(r"at least (\d+)(KiB|MiB)", str(caught.value))
    assert found is not None
    return int(found[1]) * {"KiB": 2**10, "MiB": 2**20}[found[2]]


@pytest.mark.parametrize(
    ("layers", "width", "vocabulary", "micro_batches"),
    [(2, 16, 61, 1), (5, 24, 300, 3), (3, 64, 8000, 2)],
)
def test_the_recommended_budget_works_and_a_step_less_does_not(
    layers: int, width: int, vocabulary: int, micro_batches: int
) -> None:
    model, example = gpt(layers, width, vocabulary=vocabulary), tokens(2, 16, vocabulary)
    budget = _recommended(model, example, micro_batches=micro_batches)
    with swap(model, example, memory=budget, micro_batches=micro_batches) as engine:
        assert 0 < peak_of_a_step(engine, micro_batches, example) <= budget
    less = budget - (2**20 if budget >= 8 * 2**20 else 2**10)
    with pytest.raises(PlanError, match=r"layer '\S+' alone needs .* raise --device-memory"):
        swap(model, example, memory=less, micro_batches=micro_batches)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_budgets_are_kept(seed: int) -> None:
    source = random.Random(seed)
    layers, micro_batches = source.randint(2, 6), source.randint(1, 5)
    example = tokens(source.randint(1, 4), source.randint(2, 32))
    least = _recommended(gpt(layers, 24), example, micro_batches=micro_batches)
    for _ in range(3):
        budget = int(least * (1 + source.random() * 2))
        with swap(gpt(layers, 24), example, memory=budget, micro_batches=micro_batches) as engine:
            measured = peak_of_a_step(engine, micro_batches, example)
            engine.evaluate([example] * (micro_batches + 2))
            assert max(measured, engine.device.peak_bytes()) <= engine.plan.device_peak_bytes
            assert engine.plan.device_peak_bytes <= budget


def test_more_micro_batches_in_a_tight_budget_replace_the_slots_first() -> None:
    """Old and new slots together would exceed the budget."""
    example = tokens(1, 4)
    budget = _recommended(gpt(2, 64), example, micro_batches=3)
    with swap(gpt(2, 64), example, memory=budget) as engine:
        engine.step([example])
        engine.step([example] * 3)
        assert engine.plan.micro_batches == 3
        assert engine.last is not None
        assert engine.last.device_peak_bytes <= budget
