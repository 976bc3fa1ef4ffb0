"""The sacred test: swapped training equals resident training bit for bit."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from reference import HeadFirst, assert_equal_training, gpt_loss, train, twin
from torch import Tensor, nn

import atomtrain
from atomtrain.analysis import Layer
from atomtrain.models import GPT, GPTConfig

STEPS = 3
LAYERS = 4  # embedding, two blocks, head


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(1234)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)


def fused_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, fused=True)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def gpt(dropout: float = 0.0, tied: bool = True) -> GPT:
    """A small GPT of odd sizes."""
    config = GPTConfig(
        layers=2, width=30, heads=3, head_width=7, vocabulary=101, context=19, dropout=dropout
    )
    model = GPT(config)
    if not tied:
        model.head.weight = nn.Parameter(torch.randn(101, 30) * 0.02)
    return model


def token_batches(micro_batches: int, steps: int = STEPS) -> list[list[dict[str, Tensor]]]:
    def batch() -> dict[str, Tensor]:
        tokens = torch.randint(101, (3, 18))
        return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}

    return [[batch() for _ in range(micro_batches)] for _ in range(steps)]


def random_delays(seed: int) -> Callable[[str], None]:
    """Delay every job of every stream, and compute, by up to 2 ms."""
    source = random.Random(seed)
    return lambda _: time.sleep(source.random() * 2e-3)


def swap(
    model: nn.Module, example: Any, optimizer: Any = adamw, loss: Any = None, **options: Any
) -> atomtrain.Engine:
    return atomtrain.swap(
        model,
        example,
        optimizer=optimizer,
        device="emulated:1GiB/s",
        device_memory="64MiB",
        loss=loss,
        options=atomtrain.Options(**{"optimizer_on_device": False, **options}),
    )


def check(
    model: nn.Module,
    steps: Sequence[Sequence[Any]],
    optimizer: Any = adamw,
    loss_of: Any = gpt_loss,
    loss: Any = None,
    example: Any = None,
    **options: Any,
) -> atomtrain.Engine:
    """Train a model and its twin from the same random state; compare every bit.

    `example` is the largest micro-batch; `None` is the first.
    """
    reference = twin(model)
    resident = optimizer(reference.parameters())
    state = torch.get_rng_state()
    expected = train(reference, steps, resident, loss_of, options.get("clip_norm"))
    left_at = torch.get_rng_state()
    torch.set_rng_state(state)
    options.setdefault("micro_batches", len(steps[0]))
    example = steps[0][0] if example is None else example
    with swap(model, example, optimizer, loss, **options) as engine:
        losses = [engine.step(micro_batches) for micro_batches in steps]
        assert losses == expected
        assert_equal_training(engine, reference, resident)
        assert engine.device.peak_bytes() <= engine.plan.device_peak_bytes
        assert torch.equal(torch.get_rng_state(), left_at)
    return engine


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
    with atomtrain.swap(
        model,
        steps[0][0],
        optimizer=adamw,
        device="emulated:1GiB/s",
        device_memory=_least_budget(model, steps[0][0]),
        options=atomtrain.Options(micro_batches=7, inject=random_delays(0)),
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


class Partial(nn.Module):
    """Has a parameter that takes no part, and one that only some micro-batches reach."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.used = nn.Linear(width, width)
        self.unused = nn.Parameter(torch.randn(5))
        self.sometimes = nn.Parameter(torch.randn(width))

    def forward(self, value: Tensor) -> Tensor:
        out = self.used(value)
        return out * self.sometimes if value.shape[0] % 2 else out


def regression(output: Tensor, batch: Sequence[Tensor]) -> Tensor:
    return (output - batch[1]).pow(2).mean()


def sequential_loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return regression(model(batch[0]), batch)


def pairs(rows: Sequence[int], width: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(n, width), torch.randn(n, 3)) for n in rows]


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


class Skips(nn.Module):
    """A value read by three layers, and a side input read by two: cuts wider than one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))
        self.last = _Sum()

    def chain_layers(self) -> list[Layer]:
        return [
            Layer("a", self.a, ("x",), ("ha",)),
            Layer("b", self.b, ("ha",), ("hb",)),
            Layer("c", _Gate(self.c), ("hb", "ha", "side"), ("hc",)),
            Layer("d", _Gate(self.d), ("hc", "ha", "side"), ("hd",)),
            Layer("last", self.last, ("hd", "ha", "hb"), ("loss",)),
        ]

    def forward(self, x: Tensor, side: Tensor) -> Tensor:
        ha = self.a(x)
        hb = self.b(ha)
        hc = torch.tanh(self.c(hb) * ha) + side
        hd = torch.tanh(self.d(hc) * ha) + side
        return self.last(hd, ha, hb)


class _Gate(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, value: Tensor, gate: Tensor, side: Tensor) -> Tensor:
        return torch.tanh(self.linear(value) * gate) + side


class _Sum(nn.Module):
    def forward(self, *values: Tensor) -> Tensor:
        return sum((v.pow(2).mean() for v in values), torch.zeros(()))


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
