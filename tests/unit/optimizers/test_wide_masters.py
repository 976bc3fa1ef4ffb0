"""Muon and SGD update exact masters of parameters of 16 bits; SGD is torch's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atomtrain.errors import ConfigError
from atomtrain.optimizers import SGD, AdamW, Muon, masters, moments

SHAPES = [(40, 17), (8, 24), (130,)]
Make = Callable[..., Any]


def muon(owned: list[nn.Parameter], **options: Any) -> Muon:
    matrices = [p for p in owned if p.ndim == 2]
    rest = [p for p in owned if p.ndim != 2]
    groups = [{"params": matrices, "algorithm": "muon"}, {"params": rest, "algorithm": "adamw"}]
    return Muon(groups, lr=1e-2, **options)


def sgd(owned: list[nn.Parameter], **options: Any) -> SGD:
    return SGD(owned, lr=1e-2, momentum=0.9, weight_decay=0.1, **options)


def plain_sgd(owned: list[nn.Parameter], **options: Any) -> SGD:
    return SGD(owned, lr=1e-2, **options)


ALL: list[Make] = [muon, sgd, plain_sgd]
KINDS = [
    (torch.bfloat16, "float32"),
    (torch.bfloat16, "split"),
    (torch.float16, "float32"),
]


@pytest.fixture(autouse=True)
def _small_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    monkeypatch.setattr(moments, "HOST_PASS", 256)


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter((torch.randn(shape) * 0.02).to(dtype)) for shape in SHAPES]


def gradients(steps: int, dtype: torch.dtype) -> list[list[Tensor]]:
    drawn = torch.Generator().manual_seed(steps)
    return [[torch.randn(s, generator=drawn).to(dtype) for s in SHAPES] for _ in range(steps)]


def train(optimizer: Any, owned: list[nn.Parameter], steps: list[list[Tensor]]) -> None:
    for step in steps:
        for parameter, gradient in zip(owned, step, strict=True):
            parameter.grad = gradient
        optimizer.step()


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize(("dtype", "master"), KINDS)
@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_the_master_is_what_a_float32_parameter_would_be(
    make: Make, dtype: torch.dtype, master: str, factor: float
) -> None:
    owned, steps = parameters(dtype), gradients(5, dtype)
    values = [nn.Parameter(torch.randn(shape) * 0.02) for shape in SHAPES]
    narrow, wide = make(owned, master=master), make(values)
    narrow.gradient_factor = factor
    for parameter, value in zip(owned, values, strict=True):
        narrow.set_master(parameter, value.detach().clone())
    train(narrow, owned, steps)
    train(wide, values, [[factor * g.float() for g in step] for step in steps])
    for parameter, value in zip(owned, values, strict=True):
        assert torch.equal(narrow.master_of(parameter), value)
        rounded = masters.round_stream(value) if dtype is torch.bfloat16 else value.to(dtype)
        assert torch.equal(parameter, rounded)


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize(("dtype", "master"), [(torch.float32, "float32"), *KINDS])
def test_a_saved_optimizer_goes_on_with_the_same_bits(
    make: Make, dtype: torch.dtype, master: str
) -> None:
    owned, steps = parameters(dtype), gradients(5, dtype)
    optimizer = make(owned, master=master)
    train(optimizer, owned, steps[:3])
    again = [nn.Parameter(p.detach().clone()) for p in owned]
    resumed = make(again)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(optimizer, owned, steps[3:])
    train(resumed, again, steps[3:])
    for one, other in zip(owned, again, strict=True):
        assert torch.equal(one, other)
        assert set(optimizer.state[one]) == set(resumed.state[other])
        for key, value in optimizer.state[one].items():
            assert value.dtype is resumed.state[other][key].dtype
            assert torch.equal(value, resumed.state[other][key])


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize(("dtype", "master"), [(torch.float32, "float32"), *KINDS])
def test_state_takes_the_bytes_that_are_told(make: Make, dtype: torch.dtype, master: str) -> None:
    owned = parameters(dtype)
    optimizer = make(owned, master=master)
    told = [optimizer.state_parts_of(parameter) for parameter in owned]
    train(optimizer, owned, gradients(1, dtype))
    for parameter, parts in zip(owned, told, strict=True):
        held = {k: v.nbytes for k, v in optimizer.state[parameter].items() if k != "step"}
        assert held == parts


@pytest.mark.parametrize("make", ALL)
def test_updates_too_small_for_16_bits_add_up(make: Make) -> None:
    owned = [nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))]
    optimizer = make(owned, master="split")
    for group in optimizer.param_groups:
        group.update(lr=1e-6, weight_decay=0.0)
    drawn = [[torch.eye(4, dtype=torch.bfloat16)]] * 50
    train(optimizer, owned, drawn)
    assert bool((owned[0] == 1).all())
    moved = 1 - optimizer.master_of(owned[0]).diagonal()
    assert bool((moved > 1e-5).all())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "weight_decay": 0.1},
        {"momentum": 0.5, "dampening": 0.3},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    ],
)
def test_sgd_equals_torchs_bit_for_bit(options: dict[str, Any]) -> None:
    owned, steps = parameters(torch.float32), gradients(4, torch.float32)
    theirs = [nn.Parameter(p.detach().clone()) for p in owned]
    mine, torchs = (
        SGD(owned, lr=0.03, **options),
        torch.optim.SGD(theirs, 0.03, fused=True, **options),
    )
    train(mine, owned, steps[:2])
    train(torchs, theirs, steps[:2])
    third = [nn.Parameter(p.detach().clone()) for p in theirs]
    taken = SGD(third, lr=0.03, **options)
    taken.load_state_dict(torchs.state_dict())
    train(mine, owned, steps[2:])
    train(torchs, theirs, steps[2:])
    train(taken, third, steps[2:])
    for one, other, last in zip(owned, theirs, third, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, last)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -1.0}, "lr must be at least 0"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1"),
        ({"dampening": 2.0}, "dampening must be from 0 to 1, not 2.0"),
        ({"nesterov": True}, "nesterov needs momentum above 0"),
        ({"master": "splat"}, "master 'splat' is not a format"),
    ],
)
def test_mistakes_are_refused(options: dict[str, Any], words: str) -> None:
    owned = parameters(torch.float32)
    with pytest.raises(ConfigError, match=words):
        SGD(owned, **options)
    with pytest.raises(ConfigError, match=words):
        SGD([{"params": owned, **options}])


def test_a_state_of_another_optimizer_is_refused() -> None:
    owned = parameters(torch.float32)
    optimizer = sgd(owned)
    momentum = torch.zeros(SHAPES[0], dtype=torch.bfloat16)
    for state in ({"exp_avg": momentum.float()}, {"momentum_buffer": momentum}):
        optimizer.state[owned[0]] = state
        with pytest.raises(ConfigError, match="has no float32 momentum_buffer"):
            train(optimizer, owned, gradients(1, torch.float32))
    half = parameters(torch.float16)
    with pytest.raises(ConfigError, match="parameters of float16 need"):
        muon(half, master="split")


def test_a_state_of_what_is_not_done_here_is_refused() -> None:
    owned = parameters(torch.float32)
    torchs = torch.optim.SGD(owned, lr=0.1, momentum=0.9, maximize=True)
    mine = sgd(owned)
    with pytest.raises(ConfigError, match="has maximize=True"):
        mine.load_state_dict(torchs.state_dict())
    assert mine.param_groups[0]["lr"] == 1e-2
    with pytest.raises(ConfigError, match="has amsgrad=True"):
        AdamW(owned).load_state_dict(torch.optim.AdamW(owned, amsgrad=True).state_dict())
