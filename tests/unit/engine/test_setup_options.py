"""What the command line says about gradients and compiling reaches the engine, and trains."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from atomtrain.engine.api import Fitted
from atomtrain.engine.devices.devices import open_device
from atomtrain.engine.engine import Engine
from atomtrain.engine.execution.compiled import compiled
from atomtrain.errors import ConfigError
from atomtrain.models import make_model
from atomtrain.training.config.new_recipe import new_recipe
from atomtrain.training.config.options import TrainOptions
from atomtrain.training.config.recipe import check_spending
from atomtrain.training.setup import setup
from atomtrain.training.setup.fitting import example_of
from atomtrain.training.setup.objectives import objective_of

pytestmark = pytest.mark.usefixtures("assumed_times")
SPENT: dict[str, Any] = {"spend_gradients": True, "clip_norm": 0.0}


@pytest.fixture
def operation_by_operation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run what would be compiled as it is: tests need no C++ compiler."""
    monkeypatch.setattr(
        "atomtrain.engine.api.compiled",
        lambda *given: compiled(*given, lambda graph, _: graph.forward),
    )
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def opened(options: TrainOptions) -> Engine:
    recipe = new_recipe(options)
    objective = objective_of(recipe)
    torch.manual_seed(recipe.seed)
    fitted = Fitted(example_of(recipe, 2, objective), 2, None)
    return setup._open_engine(
        make_model(recipe.sizes), lambda *_: fitted, recipe,
        [open_device(options.device, "64MiB")], objective, options, gradients=False,
    )  # fmt: skip


def loss_of(options: TrainOptions) -> float:
    recipe = new_recipe(options)
    batch = example_of(recipe, 2, objective_of(recipe))
    with opened(options) as engine:
        assert engine.planner.options.compile is options.compile
        assert engine.planner.chain.gradient_factor == 1 + (options.gradient_dtype is not None)
        engine.step([batch, batch])
        return engine.step([batch, batch])


def options_of(**more: object) -> TrainOptions:
    return TrainOptions(
        model="tiny", sequences=4, context=16, device="cpu", precision="bf16", **more
    )


@pytest.mark.skipif(not hasattr(torch.empty(0), "grad_dtype"), reason="torch is older than 2.10")
def test_gradients_add_up_in_the_type_that_is_asked_for() -> None:
    narrow, wide = loss_of(options_of()), loss_of(options_of(gradient_dtype="float32"))
    assert narrow != wide
    assert narrow == pytest.approx(wide, rel=1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("operation_by_operation")
def test_compiled_layers_train_the_same_model() -> None:
    assert loss_of(options_of(compile=True)) == pytest.approx(loss_of(options_of()), rel=1e-3)


def test_a_missing_compiler_is_told_before_the_model_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    options = TrainOptions(model="tiny", device="emulated", compile=True, data=(setup.__file__,))
    with pytest.raises(ConfigError, match="turn compile off"):
        setup.open_session(options)


@pytest.mark.slow
def test_clipping_can_be_left_out_and_gradients_spent() -> None:
    clipped, unclipped, spent = (
        TrainOptions(model="tiny", sequences=4, context=16, device="emulated", **more)
        for more in ({}, {"clip_norm": 0.0}, {"clip_norm": 0.0, "spend_gradients": True})
    )
    losses = []
    for options, norm in ((clipped, 1.0), (unclipped, None), (spent, None)):
        recipe = new_recipe(options)
        batch = example_of(recipe, 2, objective_of(recipe))
        with opened(options) as engine:
            assert engine.planner.options.clip_norm == norm
            assert engine.plan.spends is options.spend_gradients
            losses.append([engine.step([batch, batch]) for _ in range(3)])
    assert losses[0][0] == losses[1][0]
    assert losses[0] != losses[1]
    assert losses[1] == losses[2]


@pytest.mark.parametrize(
    ("clip_norm", "precision", "averaged", "told"),
    [
        (1.0, "fp32", False, "give --clip-norm 0"),
        (0.0, "fp16", False, "choose bf16"),
        (0.0, "fp32", True, "choose --average local"),
    ],
)
def test_gradients_that_are_wanted_again_are_not_spent(
    clip_norm: float, precision: str, averaged: bool, told: str
) -> None:
    check_spending(0.0, "bf16")
    with pytest.raises(ConfigError, match=told):
        check_spending(clip_norm, precision, averaged=averaged)


@pytest.mark.parametrize("norm", [-1.0, math.inf, math.nan])
def test_what_is_no_norm_is_refused(norm: float) -> None:
    with pytest.raises(ConfigError, match="--clip-norm must be a norm"):
        TrainOptions(clip_norm=norm)
