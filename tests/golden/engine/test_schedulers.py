"""Learning rates that a scheduler of `torch.optim` changes: those of the ordinary loop, wherever
the scheduler was made and whatever happens between steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from tests.support.engine_models import swap
from tests.support.reference import assert_equal_training, train, twin
from tests.support.swapped import gpt, token_batches

pytestmark = pytest.mark.usefixtures("assumed_times")
STEPS = 4
EVERYWHERE = pytest.mark.parametrize("on_device", [False, True])


def slow_updates(stream: str) -> None:
    """Let updates run on while the caller does what comes after a step."""
    if stream == "update":
        time.sleep(5e-3)


def optimizer_of(parameters: Any, lr: float | Tensor = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, foreach=False)


def scheduler_of(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 / (step + 1))


def check(
    make: Callable[[Any], torch.optim.Optimizer] = optimizer_of,
    *,
    made_inside: bool = False,
    between: Callable[[Any], object] = lambda _: None,
    sizes: tuple[int, ...] = (1,) * STEPS,
    on_device: bool,
) -> None:
    """Train beside an ordinary loop with a scheduler; compare every bit.

    Args:
        make: The optimizer.
        made_inside: Whether the factory makes the scheduler, too.
        between: What happens after each step, with the engine.
        sizes: Micro-batches of each step.
        on_device: Whether updates are done there.
    """
    schedulers: list[LambdaLR] = []

    def factory(parameters: Any) -> torch.optim.Optimizer:
        optimizer = make(parameters)
        if made_inside:
            schedulers.append(scheduler_of(optimizer))
        return optimizer

    model = gpt(tied=False)
    reference = twin(model)
    resident = factory(list(reference.parameters()))
    if not made_inside:
        schedulers.append(scheduler_of(resident))
    batches = [token_batches(size, steps=1)[0] for size in sizes]
    with swap(
        model, batches[0][0], optimizer=factory, optimizer_on_device=on_device,
        inject=slow_updates, segments=None if on_device else 2,
    ) as engine:  # fmt: skip
        if not made_inside:
            schedulers.append(scheduler_of(engine.optimizer))
        for step in batches:
            assert [engine.step(step)] == train(reference, [step], resident)
            for scheduler in schedulers:
                scheduler.step()
            between(engine)
        assert_equal_training(engine, reference, resident)


@EVERYWHERE
def test_one_that_the_factory_makes(on_device: bool) -> None:
    check(made_inside=True, on_device=on_device)


@EVERYWHERE
def test_a_text_between_steps(on_device: bool) -> None:
    check(between=lambda e: e.generate([[1, 2, 3]], max_new_tokens=2), on_device=on_device)


@EVERYWHERE
def test_steps_of_more_micro_batches(on_device: bool) -> None:
    check(sizes=(1, 2, 3), on_device=on_device)


def test_a_learning_rate_that_is_a_tensor() -> None:
    """The scheduler writes to it while updates of the step before still run."""
    check(lambda parameters: optimizer_of(parameters, torch.tensor(1e-2)), on_device=False)
