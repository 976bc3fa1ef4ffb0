"""Gradients that wait on the host for their own update only: bits, hand-overs, memory and time."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import atomtrain
from atomtrain.engine.execution.slots import Slots
from atomtrain.errors import ConfigError, PlanError
from atomtrain.optimizers import AdamW
from atomtrain.planning import Shape
from atomtrain.planning.cost.timeline import VisitTime, step_spans
from atomtrain.planning.plan.layout import STAGING_BUFFERS, host_gradients
from atomtrain.planning.plan.plan import Request
from atomtrain.planning.plan.shape import training_visits
from tests.golden.engine.test_residents import SHAPES as RESIDENT_SHAPES
from tests.support.planning_models import use_shape
from tests.support.reference import twin
from tests.support.swapped import DEEP_LAYERS as LAYERS
from tests.support.swapped import TIED, adamw, check, deep_gpt, random_delays, swap, token_batches

pytestmark = pytest.mark.usefixtures("assumed_times")
HEAD = LAYERS - 1
SHAPES = [
    *RESIDENT_SHAPES,
    Shape((0, 1, 2, 3, 4), (0, 1, 2, 3, 4, 5), 2, 2),
    Shape((0, 1, 2, 3, 4), (0, 1, 2, 3, 4, 5), 3, 1, resident_blocks=(1, 3)),
    Shape((0, 1, 2, 3, 4), (0, 1, 2, 3, 4, 5), 2, 2, resident_blocks=(0, 2), device_blocks=(2,)),
]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(99)


def slow_updates(stream: str) -> None:
    """Updates take longer than all else, so that staging buffers are waited for."""
    if stream == "update":
        time.sleep(0.02)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("inject", [slow_updates, random_delays(3)])
def test_the_bits_are_those_of_resident_training(
    monkeypatch: pytest.MonkeyPatch, shape: Shape, micro_batches: int, inject: Any
) -> None:
    use_shape(monkeypatch, shape)
    steps = token_batches(micro_batches)
    options = {"optimizer_on_device": None} if shape.device_blocks else {}
    optimizer = AdamW if shape.device_blocks else adamw
    check(
        deep_gpt(0.0, tied=False), steps, optimizer, spend_gradients=True, inject=inject, **options
    )


@pytest.mark.parametrize("resident", [(), (TIED,)])
def test_what_adds_up_on_the_host_has_a_place_of_its_own(
    monkeypatch: pytest.MonkeyPatch, resident: tuple[int, ...]
) -> None:
    """A shared weight's gradient comes with the last segment, and is complete with the first."""
    bounds = tuple(range(LAYERS + 1))
    use_shape(monkeypatch, Shape(bounds[:-1], bounds, 2, 2, resident_blocks=resident))
    check(deep_gpt(0.0, tied=True), token_batches(1), spend_gradients=True, inject=slow_updates)


def test_a_room_is_taken_only_when_its_gradients_are_spent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the tests above would not see without the wait, they see."""
    monkeypatch.setattr(Slots, "_spend", lambda *_: None)
    with pytest.raises(AssertionError):
        check(
            deep_gpt(0.0, tied=False), token_batches(1), segments=LAYERS,
            spend_gradients=True, inject=slow_updates,
        )  # fmt: skip


def test_masters_and_a_new_plan_for_more_micro_batches() -> None:
    model, few, many = deep_gpt(0.0, tied=False), token_batches(1), token_batches(4)
    reference = twin(model)
    options: dict[str, Any] = {"precision": "bf16", "segments": LAYERS}

    def factory(parameters: Any) -> AdamW:
        return AdamW(parameters, lr=1e-3, state="bfloat16", master="split")

    results = []
    for one, spends in ((model, True), (reference, False)):
        with swap(one, few[0][0], factory, spend_gradients=spends, **options) as engine:
            losses = [engine.step(step) for step in (*few, *many)]
            assert engine.plan.spends is spends
            results.append((losses, {k: v.clone() for k, v in engine.state_dict().items()}))
    (losses, state), (expected_losses, expected) = results
    assert losses == expected_losses
    assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_plan_and_engine_agree_on_the_memory_of_two_staging_buffers() -> None:
    model = deep_gpt(0.0, tied=False)
    example = token_batches(1)[0][0]
    with (
        swap(model, example, segments=LAYERS, spend_gradients=True) as spent,
        swap(twin(model), example, segments=LAYERS) as kept,
    ):
        layout = spent._core.store.layout
        largest = max(layout.gradient_range(b)[1] - layout.gradient_range(b)[0] for b in range(5))
        assert spent._core.store.gradients.numel() == STAGING_BUFFERS * largest
        less = layout.gradients.total_bytes - STAGING_BUFFERS * largest
        assert less > 0
        assert kept.plan.host_bytes - spent.plan.host_bytes == less
        assert kept.state_bytes - spent.state_bytes == less
        on_host = [r.bytes for r in spent.memory_map() if r.place == "host"]
        # The optimizer's shares are rounded down, one for each segment.
        assert 0 <= spent.plan.host_bytes - sum(on_host) < LAYERS
        assert "gradients spent at once" in spent.plan.describe()
        assert spent.plan.to_json()["spends"]


def test_plans_expect_unloads_to_wait_for_staging_buffers() -> None:
    """Updates that are slow beside all else hold up the unload of the segment after the next."""
    bounds = tuple(range(LAYERS + 1))
    visits = training_visits(Shape(bounds[:-1], bounds, 2, 2))
    times = [VisitTime(compute_s=1.0, load_s=1.0, unload_s=1.0, update_s=10.0)] * len(visits)
    spans = step_spans(visits, times, spends=True)
    ends = [span.end_s for span in spans if span.stream == "update"]
    starts = [span.start_s for span in spans if span.stream == "unload"]
    assert len(ends) == len(starts) == LAYERS
    assert starts[STAGING_BUFFERS:] == ends[:-STAGING_BUFFERS]
    freely = [span.start_s for span in step_spans(visits, times) if span.stream == "unload"]
    assert starts[:STAGING_BUFFERS] == freely[:STAGING_BUFFERS]
    assert all(
        late > early
        for late, early in zip(starts[STAGING_BUFFERS:], freely[STAGING_BUFFERS:], strict=True)
    )


def test_where_all_gradients_are_needed_it_is_refused() -> None:
    model, example = deep_gpt(0.0, tied=False), token_batches(1)[0][0]
    with pytest.raises(ConfigError, match="leave out clip_norm, or spend_gradients"):
        atomtrain.Options(spend_gradients=True, clip_norm=1.0)
    with pytest.raises(ConfigError, match="leave out fp16"):
        atomtrain.Options(spend_gradients=True, precision="fp16")
    for wrong in ({"clips": True}, {"devices": 2}):
        with pytest.raises(PlanError, match="give one device"):
            Request(micro_batches=1, spends=True, **wrong)
    with (
        swap(model, example, spend_gradients=True) as engine,
        pytest.raises(ConfigError, match="leave out spend_gradients"),
    ):
        engine.combine_gradients(lambda _, after: after[-1])


def test_every_shape_has_room_for_each_segment() -> None:
    model, example = deep_gpt(0.0, tied=True), token_batches(1)[0][0]
    with swap(model, example, segments=LAYERS) as engine:
        layout = engine._core.store.layout
    for shape in SHAPES:
        places = host_gradients(layout, shape, spends=True)
        held: list[tuple[int, int]] = []
        for block, at in places.starts.items():
            start, stop = layout.gradient_range(block)
            held.append((at, at + stop - start))
        assert max(stop for _, stop in held) <= places.total_bytes
        assert TIED in places.starts  # the shared weight of layers 0 and 4
