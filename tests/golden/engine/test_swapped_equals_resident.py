"""The sacred test: swapped training equals resident training bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import atomtrain
from tests.support.injecting import device_with
from tests.support.reference import HeadFirst, assert_equal_training, gpt_loss, train, twin
from tests.support.swapped import (
    LAYERS,
    STEPS,
    Partial,
    Skips,
    adamw,
    check,
    fused_adamw,
    gpt,
    pairs,
    random_delays,
    regression,
    sequential_loss,
    sgd,
    swap,
    token_batches,
)

pytestmark = pytest.mark.usefixtures("assumed_times")


@pytest.mark.parametrize("segments", [1, 2, 3, LAYERS])
@pytest.mark.parametrize("micro_batches", [1, 7])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_untied_gpt(segments: int, micro_batches: int, dropout: float) -> None:
    steps = token_batches(micro_batches)
    check(gpt(dropout, tied=False), steps, segments=segments)


@pytest.mark.parametrize("segments", [1, 2, 3, LAYERS])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_tied_gpt_with_one_micro_batch_equals_the_usual_loop(segments: int, dropout: float) -> None:
    check(gpt(dropout), token_batches(1), segments=segments)


@pytest.mark.parametrize("segments", [2, 3, LAYERS])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_tied_gpt_adds_the_heads_gradients_first(segments: int, dropout: float) -> None:
    model, steps = gpt(dropout), token_batches(7)
    reference = twin(model)
    head_first = HeadFirst(twin(model))
    resident = adamw([p for n, p in head_first.named_parameters() if n != "alias"
                      and p is not head_first.alias])  # fmt: skip
    state = torch.get_rng_state()
    expected = [head_first.step(micro_batches, resident) for micro_batches in steps]
    torch.set_rng_state(state)
    with swap(model, steps[0][0], micro_batches=7, segments=segments) as engine:
        assert [engine.step(micro_batches) for micro_batches in steps] == expected
        reference.load_state_dict(head_first.gpt.state_dict())
        moved = adamw(reference.parameters())
        by_name = dict(head_first.gpt.named_parameters())
        by_name["embedding.token.weight"] = head_first.weight
        for name, parameter in reference.named_parameters():
            moved.state[parameter] = resident.state[by_name[name]]
        assert_equal_training(engine, reference, moved)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_random_delays_change_nothing(seed: int, slots: int) -> None:
    steps = token_batches(2, steps=2)
    check(
        gpt(0.2, tied=False),
        steps,
        segments=LAYERS,
        slots=slots,
        clip_norm=0.5 if seed % 2 else None,
        inject=random_delays(seed),
    )


@pytest.mark.parametrize("optimizer", [adamw, fused_adamw, sgd])
@pytest.mark.parametrize("clip_norm", [None, 0.1, 1e6])
def test_optimizers_and_clipping(optimizer: Any, clip_norm: float | None) -> None:
    steps = token_batches(2)
    check(gpt(tied=False), steps, optimizer, segments=3, clip_norm=clip_norm)


def test_values_that_wait_on_the_host() -> None:
    """With little memory the values between segments go through the host."""
    model, steps = gpt(0.1, tied=False), token_batches(7)
    reference = twin(model)
    resident = adamw(reference.parameters())
    state = torch.get_rng_state()
    expected = train(reference, steps, resident)
    torch.set_rng_state(state)
    budget = _least_budget(model, steps[0][0])
    with atomtrain.swap(
        model,
        steps[0][0],
        optimizer=adamw,
        device=device_with(random_delays(0), "emulated:1GiB/s", budget),
        options=atomtrain.Options(micro_batches=7),
    ) as engine:
        assert engine.plan.boundary == "host"
        assert [engine.step(micro_batches) for micro_batches in steps] == expected
        assert_equal_training(engine, reference, resident)
        assert engine.device.peak_bytes() <= engine.plan.device_peak_bytes


def _least_budget(model: nn.Module, example: Any) -> str:
    """Return the budget that the planner's own error message recommends."""
    with pytest.raises(atomtrain.errors.PlanError) as caught:
        atomtrain.swap(
            twin(model),
            example,
            optimizer=adamw,
            device="emulated:1GiB/s",
            device_memory="1KiB",
            options=atomtrain.Options(micro_batches=7),
        )
    return str(caught.value).split("at least ")[1].split(",")[0]


@pytest.mark.parametrize("segments", [1, 2, 4])
def test_a_parameter_without_gradient_is_left_alone(segments: int) -> None:
    model = nn.Sequential(nn.Linear(7, 7), Partial(7), nn.Tanh(), nn.Linear(7, 3))
    unused = model[1].unused.detach().clone()
    steps = [pairs([8, 8], 7), pairs([9, 8], 7), pairs([8, 7], 7)]
    example = (torch.randn(9, 7), torch.randn(9, 3))
    reference = twin(model)
    resident = adamw(reference.parameters())
    expected = train(reference, steps, resident, sequential_loss)
    with swap(model, example, loss=regression, micro_batches=2, segments=segments) as engine:
        assert [engine.step(step) for step in steps] == expected
        assert_equal_training(engine, reference, resident)
        assert torch.equal(model[1].unused, unused)
        assert not engine.optimizer_state()["1.unused"]


def test_frozen_parameters_and_integer_buffers() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    model[0].weight.requires_grad_(False)
    steps = [pairs([6, 4], 5) for _ in range(STEPS)]  # the first is the example: the largest
    check(
        model,
        steps,
        lambda ps: adamw([p for p in ps if p.requires_grad]),
        sequential_loss,
        regression,
        segments=4,
    )


def test_dropout_before_batch_statistics() -> None:
    model = nn.Sequential(
        nn.Linear(5, 6), nn.Dropout(0.5), nn.BatchNorm1d(6), nn.GELU(), nn.Linear(6, 3)
    )
    steps = [pairs([4, 6, 5], 5) for _ in range(STEPS)]
    example = pairs([6], 5)[0]
    check(model, steps, loss_of=sequential_loss, loss=regression, example=example, segments=5)


@pytest.mark.parametrize("segments", [1, 2, 3, 5])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_skips_add_gradients_in_autograds_order(segments: int, micro_batches: int) -> None:
    steps = [
        [{"x": torch.randn(4, 6), "side": torch.randn(4, 6)} for _ in range(micro_batches)]
        for _ in range(STEPS)
    ]
    check(Skips(), steps, loss_of=lambda model, batch: model(**batch), segments=segments)


def test_evaluation_changes_nothing() -> None:
    model, steps = gpt(0.5, tied=False), token_batches(2)
    reference = twin(model)
    with swap(model, steps[0][0], segments=3) as engine:
        before = torch.get_rng_state()
        loss = engine.evaluate(steps[0])
        assert torch.equal(torch.get_rng_state(), before)
        assert model.training
        reference.eval()
        with torch.no_grad():
            expected = sum(float(gpt_loss(reference, batch)) for batch in steps[0]) / 2
        assert loss == expected


def test_a_learning_rate_schedule_is_read_when_a_step_begins() -> None:
    model, steps = gpt(tied=False), token_batches(2, steps=5)
    reference = twin(model)
    resident = adamw(reference.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(resident, lambda step: 1 / (1 + step))
    for step in steps:
        train(reference, [step], resident)
        schedule.step()
    with swap(
        model, steps[0][0], micro_batches=2, segments=LAYERS, inject=random_delays(5)
    ) as engine:
        ours = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 1 / (1 + step))
        for step in steps:
            engine.step(step)
            ours.step()
        assert_equal_training(engine, reference, resident)


def test_training_goes_on_exactly_from_saved_state() -> None:
    model, steps = gpt(0.2, tied=False), token_batches(2, steps=4)
    fresh = twin(model)
    reference = twin(model)
    resident = adamw(reference.parameters())
    state = torch.get_rng_state()
    train(reference, steps, resident)
    torch.set_rng_state(state)
    with swap(model, steps[0][0], micro_batches=2, segments=2) as first:
        for step in steps[:2]:
            first.step(step)
        parameters = {name: value.clone() for name, value in first.state_dict().items()}
        moments = {
            name: {key: value.clone() for key, value in entry.items()}
            for name, entry in first.optimizer_state().items()
        }
    with swap(fresh, steps[0][0], micro_batches=2, segments=LAYERS) as second:
        second.load_state_dict(parameters)
        second.load_optimizer_state(moments)
        for step in steps[2:]:
            second.step(step)
        assert_equal_training(second, reference, resident)


def test_more_micro_batches_than_planned_for_make_a_new_plan() -> None:
    model, steps = gpt(0.2, tied=False), token_batches(7)
    engine = check(model, steps, micro_batches=1)
    assert engine.plan.micro_batches == 7
