"""What a caller changes of parameters and groups between steps is used, or refused; never lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def replace_parameter(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach() * 2)


def replace_module(model: nn.Module) -> None:
    model[1] = nn.ReLU()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replace_parameter, "parameter '0.weight' was replaced"),
        (replace_module, "module '1' was replaced"),
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


def test_hooks_on_the_step_are_refused() -> None:
    def hooked(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer

    with pytest.raises(ConfigError, match="SGD has hooks on its step"):
        swap(mlp(), X, loss=square, optimizer=hooked)
    with swap(mlp(), X, loss=square) as engine:
        engine.step([X])
        handle = engine.optimizer.register_step_pre_hook(lambda *_: None)
        with pytest.raises(ConfigError, match="has hooks on its step"):
            engine.step([X])
        handle.remove()
        engine.step([X])


def tied_by_data() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model[2].weight.data = model[0].weight.data
    return model


def part_of_another() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    model[2].weight = nn.Parameter(model[0].weight.data[2:6])
    return model


def frozen_copy() -> nn.Module:
    model = tied_by_data()
    model[2].weight.requires_grad_(False)
    return model


def buffer_of_a_weight() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model[0].register_buffer("first", model[0].weight.data[0])
    return model


@pytest.mark.parametrize("make", [tied_by_data, part_of_another, frozen_copy, buffer_of_a_weight])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_memory_that_a_trained_parameter_shares_is_refused(
    make: Callable[[], nn.Module], precision: Any
) -> None:
    with pytest.raises(ConfigError, match=r"'.*' and '.*' are two tensors in one memory") as caught:
        swap(make(), X, loss=square, precision=precision)
    assert "\n" not in str(caught.value)


def test_frozen_parameters_may_share_memory_and_trained_ones_a_storage() -> None:
    model = tied_by_data().requires_grad_(False)
    model.append(nn.Linear(8, 8))
    flat = torch.randn(72)
    model[3].weight.data, model[3].bias.data = flat[:64].view(8, 8), flat[64:]
    with swap(model, X, loss=square) as engine:
        assert engine.step([X]) > 0
