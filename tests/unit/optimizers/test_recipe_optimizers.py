"""Optimizer and schedule as a run names them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from atomtrain.errors import CheckpointError, ConfigError, PlanError
from atomtrain.optimizers import SGD, AdamW, Muon
from atomtrain.training.config.new_recipe import amended, make_optimizer, new_recipe
from atomtrain.training.config.optimizing import host_bytes_per_parameter
from atomtrain.training.config.options import TrainOptions
from atomtrain.training.config.recipe import Recipe
from atomtrain.training.setup import budgets
from tests.support.engine_models import gpt, tokens


def recipe(**options: object) -> Recipe:
    return new_recipe(TrainOptions(model="tiny", steps=100, **options))


def test_the_default_is_adamw_in_float32_with_a_cosine() -> None:
    made = recipe()
    assert (made.optimizer, made.schedule) == ("adamw", "cosine")
    data = made.to_json()
    del data["optimizer"], data["schedule"]
    assert Recipe.from_json(data) == made, "a recipe from before there was a choice"


@pytest.mark.parametrize("name", ["adamw", "adamw-bfloat16", "adamw-int8", "muon", "sgd"])
def test_each_optimizer_takes_all_parameters_and_the_told_memory(name: str) -> None:
    made = recipe(optimizer=name)
    assert Recipe.from_json(json.loads(json.dumps(made.to_json()))) == made
    model = gpt(width=64)
    optimizer = make_optimizer(model, made)
    assert isinstance(optimizer, {"muon": Muon, "sgd": SGD}.get(name, AdamW))
    grouped = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in grouped} == {id(p) for p in model.parameters()}
    assert len(grouped) == len(list(model.parameters()))
    for group in optimizer.param_groups:
        decays = group["params"][0].ndim >= 2
        assert group["weight_decay"] == (made.weight_decay if decays else 0.0)
    model(**tokens()).loss.backward()
    optimizer.step()
    kept = sum(p.nbytes + p.grad.nbytes for p in grouped)
    for state in optimizer.state.values():
        kept += sum(v.nbytes for k, v in state.items() if k != "step")
    told = host_bytes_per_parameter(name) * sum(p.numel() for p in grouped)
    assert kept <= told * 1.05  # blocks of small parameters are not full
    assert kept >= told * (0.7 if name == "muon" else 1.0)


def test_the_schedule_decides_the_learning_rate() -> None:
    peak = recipe().learning_rate
    assert recipe(schedule="constant").learning_rate_at(99) == peak
    assert recipe(schedule="wsd").learning_rate_at(79) == peak
    assert recipe(schedule="wsd").learning_rate_at(90) == pytest.approx(0.55 * peak)
    assert recipe(schedule="linear").learning_rate_at(100) == pytest.approx(0.1 * peak)


def test_a_resumed_run_may_change_its_schedule_but_not_its_optimizer() -> None:
    made = recipe(optimizer="adamw-int8")
    assert amended(made, TrainOptions(schedule="wsd"), "here").schedule == "wsd"
    assert amended(made, TrainOptions(steps=3), "here").learning_rate_at(3) > 0
    with pytest.raises(ConfigError, match="--optimizer muon contradicts there"):
        amended(made, TrainOptions(optimizer="muon"), "there")


def test_a_resumed_run_may_split_its_masters_or_make_them_whole() -> None:
    whole = recipe(optimizer="adamw-bfloat16", precision="bf16")
    split = amended(whole, TrainOptions(optimizer="adamw-bfloat16-split"), "here")
    assert split == recipe(optimizer="adamw-bfloat16-split", precision="bf16")
    assert amended(split, TrainOptions(optimizer="adamw-bfloat16"), "here") == whole
    with pytest.raises(ConfigError, match="--optimizer adamw-split contradicts there"):
        amended(whole, TrainOptions(optimizer="adamw-split"), "there")
    with pytest.raises(ConfigError, match="has none that can be split"):
        amended(recipe(), TrainOptions(optimizer="adamw-split"), "there")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": "adamw-bf16"}, r"no optimizer 'adamw-bf16'. Did you mean"),
        ({"schedule": "cosin"}, r"no schedule 'cosin'. Did you mean 'cosine'\?"),
    ],
)
def test_unknown_names_are_refused(options: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        recipe(**options)
    with pytest.raises(CheckpointError, match="not a recipe of atomtrain"):
        Recipe.from_json({**recipe().to_json(), **options})


def test_default_training_is_what_torchs_fused_adamw_does() -> None:
    made, model = recipe(), gpt()
    torch.manual_seed(0)
    model(**tokens()).loss.backward()
    before = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        before[name].grad = parameter.grad.clone()
    groups = [
        {"params": [p for p in before.values() if p.ndim >= 2]},
        {"params": [p for p in before.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    options = {"betas": (0.9, 0.95), "weight_decay": made.weight_decay, "fused": True}
    torch.optim.AdamW(groups, lr=made.learning_rate, **options).step()
    make_optimizer(model, made).step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])


@pytest.mark.parametrize(
    ("precision", "bytes_each", "advised"),
    [
        ("fp32", 13, "adamw-bfloat16"), ("fp32", 11, "adamw-int8"), ("fp32", 9, None),
        ("bf16", 15, "adamw-split"), ("bf16", 13, "adamw-bfloat16"),
        ("bf16", 11, "adamw-bfloat16-split"), ("bf16", 9, "adamw-int8"), ("bf16", 7, None),
        ("fp16", 15, "adamw-bfloat16"), ("fp16", 11, "adamw-int8"),
    ],
)  # fmt: skip
def test_the_largest_state_that_would_fit_is_advised(
    precision: str, bytes_each: int, advised: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    outline = gpt()
    parameters = sum(p.numel() for p in outline.parameters())
    monkeypatch.setattr(budgets, "host_memory_bytes", lambda: bytes_each * parameters)
    with pytest.raises(PlanError, match="choose a model of at most") as caught:
        budgets.check_host_memory(outline, recipe(precision=precision), TrainOptions())
    if advised is None:
        assert str(caught.value).endswith("--disk FOLDER")
    else:
        assert str(caught.value).endswith(f"or --optimizer {advised}")
        smaller = recipe(precision=precision, optimizer=advised)
        budgets.check_host_memory(outline, smaller, TrainOptions())
    budgets.check_host_memory(outline, recipe(precision=precision), TrainOptions(disk=Path()))


@pytest.mark.parametrize(
    ("name", "each_bytes"),
    [
        ("adamw", 16), ("adamw-split", 14), ("adamw-bfloat16", 12), ("adamw-bfloat16-split", 10),
        ("adamw-int8", 8.0625), ("sgd", 12),
    ],
)  # fmt: skip
def test_bfloat16_takes_the_bytes_that_are_told(name: str, each_bytes: float) -> None:
    made = recipe(optimizer=name, precision="bf16")
    assert host_bytes_per_parameter(name, made.precision) == each_bytes
    optimizer = make_optimizer(gpt().to(torch.bfloat16), made)
    assert isinstance(optimizer, AdamW | SGD)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            own = 4 * parameter.numel() + optimizer.state_bytes_of(parameter)
            # The last block of 8-bit codes need not be full, its two scales are.
            assert own == pytest.approx(each_bytes * parameter.numel(), abs=8)


def test_a_precision_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no precision 'bf1'.*Did you mean 'bf16'"):
        recipe(precision="bf1")
    for precision in ("fp32", "fp16"):
        with pytest.raises(ConfigError, match="choose precision bf16, or the optimizer 'adamw'"):
            recipe(optimizer="adamw-split", precision=precision)
    with pytest.raises(ConfigError, match="--precision fp32 contradicts the run, which has"):
        amended(recipe(precision="bf16"), TrainOptions(precision="fp32"), "the run")
