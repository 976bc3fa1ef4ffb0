"""One step after the other: the same bits, whatever the slots and whatever happens in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import atomtrain
from atomtrain.errors import ConfigError
from atomtrain.optimizers import AdamW
from atomtrain.planning import Shape
from tests.support.planning_models import use_shape
from tests.support.reference import assert_equal_training, train, twin
from tests.support.swapped import DEEP_LAYERS as LAYERS
from tests.support.swapped import (
    TIED,
    adamw,
    check,
    deep_gpt,
    gpt,
    random_delays,
    swap,
    token_batches,
)

pytestmark = pytest.mark.usefixtures("assumed_times")
EACH = tuple(range(LAYERS + 1))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(99)


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_any_number_of_slots(slots: int, activations: Any) -> None:
    steps = token_batches(2, steps=4)
    check(
        deep_gpt(0.2, tied=False), steps, segments=LAYERS, slots=slots, activations=activations,
        host_layers=0, inject=random_delays(slots),
    )  # fmt: skip


@pytest.mark.parametrize(
    "shape",
    [
        Shape((0, 1, 3), (0, 2, 3, 5), 3, 2),
        Shape(EACH[:-1], EACH, 4, 1, "host", (TIED,)),
        Shape(EACH[:-1], EACH, 3, 2, "device", (0, TIED)),
        Shape((0, 2, 3, 4), (0, 1, 2, 4, 5), 3, 2),
        Shape((0,), (0, 5), 1, 1),
    ],
)
def test_shared_weights_come_when_all_have_added(
    monkeypatch: pytest.MonkeyPatch, shape: Shape
) -> None:
    use_shape(monkeypatch, shape)
    check(deep_gpt(0.0, tied=True), token_batches(1, steps=4), inject=random_delays(3))


class CountsItsCalls(torch.optim.SGD):
    """Steps get shorter with each call, which it counts in its groups, as many optimizers do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-group["lr"] / group["calls"])


def test_an_optimizer_that_counts_its_calls_is_called_once_a_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_shape(monkeypatch, Shape(EACH[1:-1], EACH[1:], 2, 2, "device", (), 1))
    check(
        deep_gpt(0.0, tied=False),
        token_batches(2, steps=4),
        lambda parameters: CountsItsCalls(parameters, lr=0.1),
    )


class CountsFromZero(CountsItsCalls):
    """The count is there from the beginning."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        for group in self.param_groups:
            group["calls"] = 0


@pytest.mark.parametrize("kind", [CountsItsCalls, CountsFromZero])
def test_what_an_optimizer_counts_is_saved_and_goes_on(kind: type[CountsItsCalls]) -> None:
    model, steps = deep_gpt(0.0, tied=False), token_batches(2, steps=4)
    reference = twin(model)
    resident = kind(reference.parameters(), lr=0.1)
    losses = train(reference, steps, resident)
    options: dict[str, Any] = {"segments": 3, "micro_batches": 2}
    found: list[float] = []
    saved: dict[str, Any] | None = None
    for half in (steps[:2], steps[2:]):
        with swap(
            model, half[0][0], optimizer=lambda parameters: kind(parameters, lr=0.1), **options
        ) as engine:
            if saved is not None:
                engine.optimizer.load_state_dict(saved)
            found += [engine.step(step) for step in half]
            saved = engine.optimizer.state_dict()
            assert [group["calls"] for group in saved["param_groups"]] == [len(found)]
    assert found == losses


class FeelsAll(torch.optim.SGD):
    """A number of each group depends on all its gradients."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            given = [p.grad for p in group["params"] if p.grad is not None]
            group["largest"] = max(float(gradient.abs().max()) for gradient in given)


def test_an_optimizer_whose_parameters_depend_on_each_other_is_refused() -> None:
    steps = token_batches(1, steps=1)
    with swap(
        deep_gpt(0.0, tied=False), steps[0][0], optimizer=lambda p: FeelsAll(p, lr=0.1), segments=3
    ) as engine:
        engine.step(steps[0])
        message = "FeelsAll has come to unlike values of 'largest'"
        with pytest.raises(ConfigError, match=message):
            engine.synchronize()
        with pytest.raises(ConfigError, match=message):
            engine.close()


def scale(engine: atomtrain.Engine | None, model: nn.Module) -> None:
    """Write to what the engine gives out for writing; without one, to the model."""
    if engine is not None:
        for start, stop in engine.fragment_ranges():
            with engine.fragment(start, stop) as values:
                values.mul_(0.5)
    else:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)


def load(engine: atomtrain.Engine | None, model: nn.Module) -> None:
    of = engine.state_dict() if engine is not None else model.state_dict()
    halves = {name: value * 0.5 for name, value in of.items()}
    (engine if engine is not None else model).load_state_dict(halves)


def write(engine: atomtrain.Engine | None, model: nn.Module) -> None:
    if engine is not None:
        engine.synchronize()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


@pytest.mark.parametrize("between", [scale, load, write])
@pytest.mark.parametrize("on_device", [False, True])
def test_what_is_written_between_steps_is_what_the_next_one_uses(
    between: Callable[[Any, nn.Module], None], on_device: bool
) -> None:
    model, steps = gpt(0.0, tied=False), token_batches(2, steps=4)
    reference = twin(model)
    resident = adamw(reference.parameters())
    options: dict[str, Any] = {"segments": 4, "slots": 3, "host_layers": 0, "micro_batches": 2}
    if on_device:
        options = {"optimizer_on_device": True, "micro_batches": 2}
    with swap(model, steps[0][0], inject=random_delays(1), **options) as engine:
        for first, second in (steps[:2], steps[2:]):
            for step in (first, second):
                assert [engine.step(step)] == train(reference, [step], resident)
            between(engine, model)
            between(None, reference)
        assert_equal_training(engine, reference, resident)


def test_evaluations_and_larger_steps_in_between() -> None:
    model = gpt(0.0, tied=False)
    steps = [*token_batches(2, steps=2), *token_batches(3, steps=2)]
    reference = twin(model)
    resident = adamw(reference.parameters())
    options = {"segments": 4, "slots": 3, "host_layers": 0, "micro_batches": 2}
    with swap(model, steps[0][0], inject=random_delays(2), **options) as engine:
        for step in steps:
            assert [engine.step(step)] == train(reference, [step], resident)
            engine.step(step)
            train(reference, [step], resident)
            with torch.no_grad():
                expected = sum(float(twin(reference)(**batch).loss) for batch in step) / len(step)
            assert engine.evaluate(step) == expected
        assert_equal_training(engine, reference, resident)


def test_masters_and_their_streams() -> None:
    """In bfloat16 what is loaded is what the update wrote last."""

    def optimizer(parameters: Any) -> AdamW:
        return AdamW(parameters, lr=1e-2)

    steps = token_batches(2, steps=4)
    states = []
    for slots in (1, 4):
        torch.manual_seed(1)
        model = deep_gpt(0.0, tied=False)
        with swap(
            model, steps[0][0], optimizer, precision="bf16", slots=slots, segments=LAYERS,
            host_layers=0, micro_batches=2, inject=random_delays(slots),
        ) as engine:  # fmt: skip
            losses = [engine.step(step) for step in steps]
            states.append((losses, {n: v.clone() for n, v in engine.state_dict().items()}))
    assert states[0][0] == states[1][0]
    for name, value in states[0][1].items():
        assert torch.equal(value, states[1][1][name]), name
