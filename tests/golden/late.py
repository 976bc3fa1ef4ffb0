"""Updates that are one step late, as an ordinary loop: the truth for delayed updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from reference import assert_equal_training, gpt_loss, train, twin
from swapped import adamw, swap
from torch import Tensor, nn

import atomtrain


class LateSteps:
    """An ordinary optimizer, each of whose steps applies the gradients of the one before, with the
    learning rates of that one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._waiting: list[tuple[nn.Parameter, Tensor | None]] = []
        self._rates: list[float] = []

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self) -> None:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        own, rates = [(p, p.grad) for p in parameters], self._now()
        self.settle()
        self._waiting, self._rates = own, rates
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def settle(self) -> None:
        for parameter, gradient in self._waiting:
            parameter.grad = gradient
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=False):
            group["lr"] = rate
        if self._waiting:
            self.optimizer.step()
        self._waiting = []

    def _now(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]


def check_late(
    model: nn.Module,
    steps: Sequence[Sequence[Any]],
    optimizer: Any = adamw,
    loss_of: Any = gpt_loss,
    between: Callable[[atomtrain.Engine], object] = lambda _: None,
    rates: Sequence[float] = (),
    **options: Any,
) -> None:
    """Compare every bit with resident training whose gradients are applied one step late.

    `between` is called after the second step, and settles the engine if it returns anything.
    `rates` are the learning rates of the steps, if they differ.
    """
    reference, loss = twin(model), options.pop("loss", None)
    resident = optimizer(reference.parameters())
    late, clip_norm = LateSteps(resident), options.get("clip_norm")
    options.setdefault("micro_batches", len(steps[0]))
    expected, losses = [], []
    with swap(model, steps[0][0], optimizer, loss, delay_updates=True, **options) as engine:
        for index, step in enumerate(steps):
            for one in (engine.optimizer, resident) if rates else ():
                one.param_groups[0]["lr"] = rates[index]
            losses.append(engine.step(step))
            settles = index == 1 and between(engine)
            expected += train(reference, [step], late, loss_of, clip_norm)  # type: ignore[arg-type]
            if settles:
                late.settle()
        late.settle()
        assert losses == expected
        assert_equal_training(engine, reference, resident)
        assert engine.device.peak_bytes() <= engine.plan.device_peak_bytes
