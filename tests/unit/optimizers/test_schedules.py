"""Learning rates as functions of the step."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from atomtrain.errors import ConfigError
from atomtrain.optimizers import SGD, Schedule
from atomtrain.optimizers.schedules import KINDS


def test_the_warm_up_reaches_the_peak_in_its_last_step() -> None:
    schedule = Schedule(steps=100, warmup_steps=4)
    assert [schedule(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_each_kind_at_its_quarters() -> None:
    def at(kind: str, **more: Any) -> list[float]:
        schedule = Schedule(kind=kind, steps=100, final=0.2, **more)
        return [round(schedule(step), 3) for step in (0, 25, 50, 75, 100, 1000)]

    assert at("constant") == [1, 1, 1, 1, 1, 1]
    assert at("linear") == [1, 0.8, 0.6, 0.4, 0.2, 0.2]
    assert at("cosine") == [1, 0.883, 0.6, 0.317, 0.2, 0.2]
    assert at("wsd", decay_steps=50) == [1, 1, 1, 0.6, 0.2, 0.2]
    assert at("wsd") == [1, 1, 1, 1, 0.2, 0.2]
    assert at("wsd", decay_steps=0) == [1, 1, 1, 1, 0.2, 0.2]


def test_the_decay_of_wsd_is_the_last_fifth_by_default() -> None:
    schedule = Schedule(kind="wsd", steps=100, final=0.0)
    assert schedule(80) == 1.0
    assert schedule(90) == pytest.approx(0.5)
    assert schedule(99) == pytest.approx(0.05)


@given(
    kind=st.sampled_from(KINDS),
    steps=st.integers(1, 200),
    warmup_share=st.floats(0, 1),
    final=st.floats(0, 1),
)
def test_it_rises_to_the_peak_then_never_rises(
    kind: str, steps: int, warmup_share: float, final: float
) -> None:
    warmup_steps = int(warmup_share * steps)
    schedule = Schedule(kind=kind, steps=steps, warmup_steps=warmup_steps, final=final)
    factors = [schedule(step) for step in range(steps + 2)]
    rising, falling = factors[:warmup_steps], factors[warmup_steps:]
    assert rising == sorted(rising)
    assert all(0 <= factor <= 1 for factor in factors)
    assert all(after <= before + 1e-12 for before, after in itertools.pairwise(falling))
    assert factors[-1] == pytest.approx(1.0 if kind == "constant" else final)


def test_torchs_scheduler_multiplies_the_rate_of_each_group() -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": [parameters[0]]}, {"params": [parameters[1]], "lr": 3.0}]
    optimizer = SGD(groups, lr=1.0)
    schedule = Schedule(kind="linear", steps=10, warmup_steps=2, final=0.0)
    scheduler = LambdaLR(optimizer, schedule)
    for step in range(12):
        factor = schedule(step)
        assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([factor, 3 * factor])
        optimizer.step()
        scheduler.step()
    assert scheduler.state_dict()["last_epoch"] == 12


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "cosin"}, r"no schedule 'cosin'. Did you mean 'cosine'\?"),
        ({"steps": 0}, "steps must be a whole number of at least 1, not 0"),
        ({"steps": 1.5}, "steps must be a whole number"),
        ({"warmup_steps": -1}, "warmup_steps must be a whole number of at least 0"),
        ({"warmup_steps": 11}, "warmup_steps 11 are more than the 10 steps"),
        ({"final": 1.1}, "final must be a factor from 0 to 1"),
        ({"decay_steps": 2}, "decay_steps belongs to the schedule wsd, not to cosine"),
        ({"kind": "wsd", "warmup_steps": 5, "decay_steps": 6}, "are more than the 5 steps after"),
        ({"kind": "wsd", "decay_steps": True}, "decay_steps must be a whole number"),
    ],
)
def test_numbers_out_of_range_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Schedule(**{"steps": 10, **change})


def test_a_negative_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="counted from 0"):
        Schedule(steps=1)(-1)
