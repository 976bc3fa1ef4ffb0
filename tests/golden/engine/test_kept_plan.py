"""A training that goes on has the bits of one that was not interrupted, whatever is measured now.

Where a weight is shared and a step has several micro-batches, one segment has other bits than
several.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import atomtrain
from tests.support.changing_profile import ChangingProfile
from tests.support.reference import twin
from tests.support.swapped import adamw, gpt, swap, token_batches

MICRO_BATCHES = 3
STOPPED_AFTER = 2
State = dict[str, Tensor]


@pytest.fixture
def profile(assumed_times: None, monkeypatch: pytest.MonkeyPatch) -> ChangingProfile:
    given = ChangingProfile()
    given.install(monkeypatch)
    return given


def opened(model: Any, steps: Any, plan: Any = None) -> atomtrain.Engine:
    return swap(
        model, steps[0][0], adamw, micro_batches=MICRO_BATCHES, host_layers=0, plan=plan
    )  # fmt: skip


def trained(engine: atomtrain.Engine, steps: Any) -> State:
    for step in steps:
        engine.step(step)
    return {name: value.clone() for name, value in engine.state_dict().items()}


def equal(one: State, other: State) -> bool:
    return all(value.equal(other[name]) for name, value in one.items())


@pytest.mark.parametrize("several", [True, False])
def test_who_goes_on_by_the_same_plan_has_the_same_bits(
    profile: ChangingProfile, several: bool
) -> None:
    torch.manual_seed(0)
    model, steps = gpt(), token_batches(MICRO_BATCHES, 5)
    models = [twin(model) for _ in range(4)]
    states = {}
    for way in (several, not several):
        profile.several = way
        with opened(models.pop(), steps) as engine:
            assert (engine.plan.segments > 1) is way
            states[way] = trained(engine, steps)
    straight, other = states[several], states[not several]
    assert not equal(straight, other), "else this would show nothing"
    profile.several = several
    with opened(models.pop(), steps) as engine:
        trained(engine, steps[:STOPPED_AFTER])
        values, moments, plan = engine.state_dict(), engine.optimizer_state(), engine.kept_plan()
        values = {name: value.clone() for name, value in values.items()}
    profile.several = not several
    with opened(models.pop(), steps, plan) as engine:
        assert engine.planner.before == "as before"
        assert (engine.plan.segments > 1) is several
        engine.load_state_dict(values)
        engine.load_optimizer_state(moments)
        assert equal(trained(engine, steps[STOPPED_AFTER:]), straight)
