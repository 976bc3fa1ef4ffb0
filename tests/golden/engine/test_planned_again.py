"""Another plan within a run: the same bits, and none that would add in another order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import atomtrain
from atomtrain.engine.calibration.profiling import Profile
from atomtrain.engine.planner import Planner
from atomtrain.errors import ConfigError, PlanError
from atomtrain.planning import Shape
from tests.support.planning_models import use_shape
from tests.support.reference import assert_equal_training, train, twin
from tests.support.swapped import DEEP_LAYERS as LAYERS
from tests.support.swapped import TIED, adamw, deep_gpt, gpt, swap, token_batches

pytestmark = pytest.mark.usefixtures("assumed_times")
EACH = tuple(range(LAYERS + 1))
WHOLE = Shape((0,), (0, LAYERS), 1, 1)
SINGLE = Shape(EACH[:-1], EACH, 2, 2)
PAIRS = Shape((0, 2, 3), (0, 2, 3, LAYERS), 2, 1)
KEPT = Shape(EACH[:-1], EACH, LAYERS, 2, activations=(*["keep"] * (LAYERS - 1), "recompute"))
SENT = ("offload",) * (LAYERS - 1)
OFFLOADED = Shape(EACH[:-1], EACH, 3, 2, "host", activations=(*SENT, "recompute"))
RESIDENT = Shape(EACH[:-1], EACH, 2, 2, "device", (0, 2))
ON_HOST = Shape(EACH[1:-1], EACH[1:], 2, 2, "device", (), 1)
ANY = 0.0
"""However slow the other plan is."""


@contextmanager
def planning(shape: Shape) -> Iterator[None]:
    """Let engines run this shape."""
    with pytest.MonkeyPatch.context() as patch:
        use_shape(patch, shape)
        plan = Planner.plan
        patch.setattr(Planner, "plan", lambda planner, count, on_disk=None: plan(planner, count))
        yield


def unchanged(engine: atomtrain.Engine, slower: float = 1.0) -> Any:
    """Return what measures the same machine again, with layers that take so many times as long."""
    planner = engine.planner
    times = {kind: time.scaled(slower) for kind, time in planner.times.items()}
    return lambda inputs: Profile(planner.machine, times, 0.01)


def check(model: Any, micro_batches: int, shapes: tuple[Shape, ...], followed: bool = True) -> None:
    """Train by one shape after the other, two steps each; compare every bit with resident ones."""
    steps = token_batches(micro_batches, steps=2 * len(shapes))
    reference = twin(model)
    resident = adamw(reference.parameters())
    state = torch.get_rng_state()
    expected = train(reference, steps, resident)
    left_at = torch.get_rng_state()
    torch.set_rng_state(state)
    with planning(shapes[0]):
        engine = swap(model, steps[0][0], micro_batches=micro_batches)
    with engine:
        losses = [engine.step(step) for step in steps[:2]]
        for number, shape in enumerate(shapes[1:], 1):
            with planning(shape):
                changed = engine.plan_by(unchanged(engine), steps[0][0], ANY)
            assert changed is followed
            assert (engine.plan.shape == shape) is followed
            losses += [engine.step(step) for step in steps[2 * number : 2 * number + 2]]
            assert engine.device.peak_bytes() <= engine.plan.device_peak_bytes
        assert losses == expected
        assert_equal_training(engine, reference, resident)
        assert torch.equal(torch.get_rng_state(), left_at)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_every_kind_of_plan_goes_on_where_another_left(micro_batches: int) -> None:
    shapes = (WHOLE, SINGLE, KEPT, PAIRS, OFFLOADED, RESIDENT, SINGLE, WHOLE)
    check(deep_gpt(0.2, tied=False), micro_batches, shapes)
    check(deep_gpt(0.0, tied=False), micro_batches, (SINGLE, ON_HOST, KEPT))


def test_a_tied_weight_whose_layers_stay_apart_changes_nothing() -> None:
    shapes = (SINGLE, PAIRS, Shape(EACH[:-1], EACH, 3, 2, "device", (0, TIED)), ON_HOST)
    reference = deep_gpt(0.0, tied=True)
    steps = token_batches(2, steps=2 * len(shapes))
    with planning(SINGLE), swap(twin(reference), steps[0][0], micro_batches=2) as engine:
        expected = [engine.step(step) for step in steps]
        state = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    with planning(SINGLE):
        engine = swap(twin(reference), steps[0][0], micro_batches=2)
    with engine:
        losses = [engine.step(step) for step in steps[:2]]
        for number, shape in enumerate(shapes[1:], 1):
            with planning(shape):
                assert engine.plan_by(unchanged(engine), steps[0][0], ANY)
            losses += [engine.step(step) for step in steps[2 * number : 2 * number + 2]]
        assert losses == expected
        found = engine.state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_a_plan_that_brings_the_layers_of_a_tied_weight_together_is_not_followed() -> None:
    check(deep_gpt(0.0, tied=True), 2, (WHOLE, SINGLE), followed=False)


def test_one_micro_batch_has_one_order() -> None:
    check(deep_gpt(0.0, tied=True), 1, (WHOLE, SINGLE, WHOLE))


def test_a_plan_that_is_hardly_faster_is_not_followed_but_predicted_anew() -> None:
    (step,) = token_batches(2, steps=1)
    with planning(SINGLE):
        engine = swap(gpt(tied=False, layers=LAYERS - 2), step[0], micro_batches=2)
    with engine:
        before = engine.plan
        assert engine.planner.timed(before) == before, "as it was predicted"
        with planning(WHOLE):
            assert not engine.plan_by(unchanged(engine, slower=10.0), step[0], 1e9)
        assert engine.plan.shape == before.shape
        assert engine.plan.step_s > 2 * before.step_s
        assert engine.plan.device_peak_bytes == before.device_peak_bytes
        assert engine.planner.crowded_share == 0.01


def test_slower_layers_bring_another_plan_by_the_planner_itself() -> None:
    """With no shape given: the search finds it, and the steps by it have the same bits."""
    model = deep_gpt(0.0, tied=False)
    steps = token_batches(2, steps=4)
    reference = twin(model)
    resident = adamw(reference.parameters())
    expected = train(reference, steps, resident)
    with atomtrain.swap(
        model, steps[0][0], optimizer=adamw, device="emulated:64MiB/s", device_memory="160KiB",
        options=atomtrain.Options(micro_batches=2),
    ) as engine:  # fmt: skip
        losses = [engine.step(step) for step in steps[:2]]
        first = engine.plan.shape
        assert "offload" not in first.activations
        assert engine.plan_by(unchanged(engine, slower=100.0), steps[0][0], 1.05)
        assert "offload" in engine.plan.shape.activations
        assert not engine.plan_by(unchanged(engine), steps[0][0], 1.05), "it is the best one"
        losses += [engine.step(step) for step in steps[2:]]
        assert losses == expected
        assert_equal_training(engine, reference, resident)


def test_what_fails_while_measuring_changes_nothing() -> None:
    model = deep_gpt(0.0, tied=False)
    steps = token_batches(2, steps=3)
    reference = twin(model)
    resident = adamw(reference.parameters())
    expected = train(reference, steps, resident)

    def fail(_: Any) -> Profile:
        raise PlanError("too little memory to measure in")

    with swap(model, steps[0][0], micro_batches=2) as engine:
        losses = [engine.step(steps[0])]
        with pytest.raises(PlanError, match="to measure in"):
            engine.plan_by(fail, steps[0][0], ANY)
        losses += [engine.step(step) for step in steps[1:]]
        assert losses == expected
        assert_equal_training(engine, reference, resident)


def test_where_nothing_could_change_nothing_is_measured() -> None:
    (step,) = token_batches(1, steps=1)
    with atomtrain.swap(gpt(), step[0], optimizer=adamw, device="cpu") as engine:
        assert not engine.can_plan_again
        with pytest.raises(ConfigError, match="keeps its plan"):
            engine.plan_by(unchanged(engine), step[0], ANY)
