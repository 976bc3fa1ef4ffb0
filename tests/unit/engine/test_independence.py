"""Optimizers of others whose parameters depend on each other, or that draw, are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from atomtrain.engine.updates.independence import check_independence
from atomtrain.errors import ConfigError


class Plain(torch.optim.SGD):
    """Momentum of its own, and a count in its groups."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state["mean"] = 0.9 * state.get("mean", 0.0) + parameter.grad
                parameter.sub_(group["lr"] * state["mean"] / group["calls"])


class ClipsByAll(torch.optim.AdamW):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 1.0)
        super().step()


class CountsParameters(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                group["calls"] = group.get("calls", 0) + 1
                parameter.sub_(group["lr"] / group["calls"] * parameter.grad)


class RoundsAtRandom(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * (parameter.grad + torch.rand_like(parameter)))


class NeedsItsOwn(torch.optim.SGD):
    """Knows the parameters that it was made of, and no others."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.scales = {id(parameter): 2.0 for parameter in parameters}
        self.steps: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps.append(1)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(self.scales[id(parameter)] * group["lr"] * parameter.grad)


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 5, dtype=dtype)), nn.Parameter(torch.ones(7, dtype=dtype))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ClipsByAll, "ClipsByAll updates a parameter otherwise if another one is beside it"),
        (CountsParameters, "CountsParameters updates a parameter otherwise"),
        (RoundsAtRandom, "RoundsAtRandom draws random numbers"),
    ],
)
def test_what_looks_at_more_than_one_parameter_or_draws_is_refused(
    kind: type[torch.optim.SGD], message: str, dtype: torch.dtype
) -> None:
    optimizer = kind(parameters(dtype), lr=0.1)
    with pytest.raises(ConfigError, match=message) as caught:
        check_independence(optimizer)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [Plain, NeedsItsOwn])
def test_what_does_not_or_cannot_be_tried_is_taken_and_nothing_changes(
    kind: type[torch.optim.SGD],
) -> None:
    given = parameters()
    optimizer = kind(given, lr=0.1)
    before = torch.get_rng_state()
    check_independence(optimizer)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(parameter, torch.ones_like(parameter)) for parameter in given)
    assert not optimizer.state
    assert "calls" not in optimizer.param_groups[0]
    assert not getattr(optimizer, "steps", [])


def test_a_loss_that_is_computed_again_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"LBFGS computes the loss again within its step"):
        check_independence(torch.optim.LBFGS(parameters()))
