"""What a caller changes of parameters and groups between steps is used, or refused; never lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from atomtrain.errors import ConfigError
from tests.support.engine_models import mlp, square, swap

pytestmark = pytest.mark.usefixtures("assumed_times")
X = torch.ones(2, 8)


def freeze(model: nn.Module) -> None:
    model[0].requires_grad_(False)


def replace_data(model: nn.Module) -> None:
    model[0].weight.data = model[0].weight.data * 2


def convert(model: nn.Module) -> None:
    model.double().float()


def hook(model: nn.Module) -> None:
    model[0].weight.register_hook(lambda gradient: gradient * 0)


def late_hook(model: nn.Module) -> None:
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (freeze, "'0.weight' was swapped with requires_grad=True"),
        (replace_data, "'0.weight' has left the engine's memory"),
        (convert, "'0.weight' has left the engine's memory"),
        (hook, "'0.weight' has a hook"),
        (late_hook, "'0.weight' has a hook"),
    ],
)
def test_what_would_have_no_effect_is_refused(
    change: Callable[[nn.Module], None], message: str
) -> None:
    model = mlp()
    with swap(model, X, loss=square) as engine:
        engine.step([X])
        engine.synchronize()
        change(model)
        with pytest.raises(ConfigError, match=message):
            engine.step([X])


def test_thawing_is_refused_and_freezing_again_goes_on() -> None:
    model = mlp()
    freeze(model)
    with swap(model, X, loss=square) as engine:
        model[0].requires_grad_(True)
        with pytest.raises(ConfigError, match="requires_grad=False and has requires_grad=True"):
            engine.step([X])
        freeze(model)
        engine.step([X])


@pytest.mark.parametrize("change", [hook, late_hook])
def test_a_hook_that_was_there_before_is_refused_at_once(
    change: Callable[[nn.Module], None],
) -> None:
    model = mlp()
    change(model)
    with pytest.raises(ConfigError, match=r"'0\.weight' has a hook"):
        swap(model, X, loss=square)


def test_a_hook_of_a_frozen_parameter_does_no_harm() -> None:
    model = mlp()
    hook(model)
    freeze(model)
    with swap(model, X, loss=square) as engine:
        engine.step([X])


def test_a_group_that_comes_later_is_refused() -> None:
    model = mlp()
    with swap(
        model, X, loss=square, optimizer=lambda parameters: torch.optim.SGD(parameters[2:], lr=0.1)
    ) as engine:
        engine.optimizer.add_param_group({"params": [model[0].weight]})
        with pytest.raises(ConfigError, match="other parameters than when the model was swapped"):
            engine.step([X])
