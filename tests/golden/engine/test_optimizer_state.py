"""What `torch.optim` saves and loads is what the engine's blocks have, bit for bit."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import atomtrain
from atomtrain.errors import ConfigError
from atomtrain.optimizers import AdamW
from tests.support.engine_models import mlp, square, swap
from tests.support.reference import assert_equal_training, assert_same_bits, train, twin

pytestmark = pytest.mark.usefixtures("assumed_times")
Factory = Callable[[Any], torch.optim.Optimizer]
FACTORIES: dict[str, Factory] = {
    "torch": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "own": lambda parameters: AdamW(parameters, lr=1e-2),
    "int8": lambda parameters: AdamW(parameters, lr=1e-2, state="int8"),
    # Its state is there before the first step.
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
}
STEPS = [[torch.randn(4, 8, generator=torch.Generator().manual_seed(n))] for n in range(2)]


def loss_of(model: nn.Module, batch: Any) -> Any:
    return square(model(batch))


def both(engine: atomtrain.Engine, reference: nn.Module, resident: Any) -> None:
    """Train both, and compare."""
    for step in STEPS:
        assert [engine.step(step)] == train(reference, [step], resident, loss_of)
    assert_equal_training(engine, reference, resident)


def saved(engine: atomtrain.Engine) -> tuple[Any, Any]:
    """Return copies of the model's and the optimizer's state."""
    values = {name: value.clone() for name, value in engine.state_dict().items()}
    return values, copy.deepcopy(engine.optimizer.state_dict())


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("on_device", [False, True])
def test_there_and_back(name: str, on_device: bool) -> None:
    if on_device and name == "adagrad":
        pytest.skip("the engine does not know what it takes on a device")
    model, factory = mlp(), FACTORIES[name]
    reference = twin(model)
    resident = factory(reference.parameters())
    where = {"optimizer_on_device": on_device, "segments": None if on_device else 2}
    with swap(model, STEPS[0][0], optimizer=factory, loss=square, **where) as engine:
        both(engine, reference, resident)
        values, state = saved(engine)
        expected = copy.deepcopy(resident.state_dict())
        assert state["state"].keys() == expected["state"].keys()
        for number, of_one in expected["state"].items():
            assert state["state"][number].keys() == of_one.keys()
            for key, value in of_one.items():
                assert_same_bits(torch.as_tensor(state["state"][number][key]), value, key)
        both(engine, reference, resident)
        engine.load_state_dict(values)
        engine.optimizer.load_state_dict(state)
        reference.load_state_dict(values)
        resident.load_state_dict(expected)
        both(engine, reference, resident)

    def resumed(parameters: Any) -> torch.optim.Optimizer:
        """A factory that goes on from what was saved, as an ordinary program does."""
        optimizer = factory(parameters)
        optimizer.load_state_dict(copy.deepcopy(state))
        return optimizer

    model = mlp()
    model.load_state_dict(values)
    reference = twin(model)
    resident = resumed(list(reference.parameters()))
    with swap(model, STEPS[0][0], optimizer=resumed, loss=square, **where) as engine:
        both(engine, reference, resident)


def test_with_masters_and_on_disk(tmp_path: Path) -> None:
    steps = [[step[0].bfloat16()] for step in STEPS]
    ends = []
    for loads in (False, True):
        torch.manual_seed(5)
        with swap(
            mlp(), steps[0][0], optimizer=FACTORIES["own"], loss=square, precision="bf16",
            disk=tmp_path, on_disk="masters",
        ) as engine:  # fmt: skip
            engine.step(steps[0])
            values, state = saved(engine)
            if loads:
                engine.step(steps[1])
                engine.load_state_dict(values)
                engine.optimizer.load_state_dict(state)
            engine.step(steps[1])
            ends.append(saved(engine))
    (values, state), (values_again, state_again) = ends
    for name, value in values.items():
        assert_same_bits(values_again[name], value, name)
    for number, of_one in state["state"].items():
        for key, value in of_one.items():
            assert_same_bits(state_again["state"][number][key], value, key)


def test_a_fresh_state_takes_the_place_of_the_old_one() -> None:
    factory = FACTORIES["torch"]
    with swap(mlp(), STEPS[0][0], optimizer=factory, loss=square) as engine:
        fresh = copy.deepcopy(engine.optimizer.state_dict())
        engine.step(STEPS[0])
        engine.optimizer.load_state_dict(fresh)
        assert not any(engine.optimizer_state().values())


def test_a_state_of_another_model_changes_nothing() -> None:
    factory = FACTORIES["torch"]
    with swap(mlp(width=6), torch.ones(4, 6), optimizer=factory, loss=square) as other:
        other.step([torch.ones(4, 6)])
        _, state = saved(other)
    with swap(mlp(), STEPS[0][0], optimizer=factory, loss=square) as engine:
        engine.step(STEPS[0])
        before = copy.deepcopy(engine.optimizer_state())
        engine.optimizer.load_state_dict(state)
        with pytest.raises(ConfigError, match=r"'0.weight' has shape \[6, 6\]"):
            engine.step(STEPS[0])
        for name, moments in engine.optimizer_state().items():
            for key, value in moments.items():
                assert_same_bits(value, before[name][key], name)


def test_an_engine_that_is_forgotten_leaves_no_state_to_save() -> None:
    engine = swap(mlp(), STEPS[0][0], optimizer=FACTORIES["torch"], loss=square)
    optimizer = engine.optimizer
    engine.close()
    del engine
    gc.collect()
    with pytest.raises(ConfigError, match="gone with its engine"):
        optimizer.state_dict()
